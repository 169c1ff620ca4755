"""Every recipe of the README, and the examples in Python, run as they stand there, with a tiny model and a few steps."""

import io
import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from tests.test_notebooks import chat_model  # noqa: F401  a fixture

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
RECIPES = README.partition("\n## Recipes\n")[2].partition("\n## ")[0]
BLOCKS = re.findall(r"```bash\n(.*?)```", RECIPES, flags=re.DOTALL)
TINY = {
    "wedlm_jax.train": ("train.steps=2", "train.batch_size=8", "train.eval_every=0", "data.row_length=128"),
    "wedlm_jax.data": ("data.row_length=128",),
    "wedlm_jax.generate": ("--max-new-tokens", "4"),
    "wedlm_jax.evaluate": ("--max-new-tokens", "4"),
    "wedlm_jax.tradeoff": ("--max-new-tokens", "4", "--thresholds", "0.4", "--penalties", "0"),
    "wedlm_jax.chat": ("--max-new-tokens", "4"),
}


def test_there_are_recipes_and_each_is_at_most_five_lines():
    assert len(BLOCKS) >= 4
    assert all(len(block.strip().splitlines()) <= 5 for block in BLOCKS)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.split("#")[0].split()[2].removeprefix("wedlm_jax."))
def test_a_recipe_runs(block, chat_model, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat.jsonl").write_text(
        "".join(
            json.dumps({"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}."}]})
            + "\n"
            for i in range(80)
        )
    )
    (tmp_path / "corpus").mkdir()
    for i in range(80):
        (tmp_path / "corpus" / f"{i}.txt").write_text(f"Tom has {i} apples. " * 20)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Tom"}\n{"messages": [{"role": "user", "content": "Anna"}]}\n')
    (tmp_path / "qa.jsonl").write_text(
        '{"prompt": "Tom", "answer": "3"}\n{"messages": [{"role": "user", "content": "Anna"}], "answer": "So #### 4"}\n'
    )
    for line in block.strip().splitlines():
        python, dash_m, module, *arguments = shlex.split(line, comments=True)
        assert (python, dash_m) == ("python", "-m")
        arguments = [argument.replace("MODEL", chat_model) for argument in arguments]
        monkeypatch.setattr(sys, "stdin", io.StringIO("Anna has 3 apples.\n"))  # chat reads it
        monkeypatch.setattr(sys, "argv", [module, *arguments, *TINY.get(module, ())])
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def run_the_example(page: str, model: str) -> dict:
    """The names that the only example in Python of a page leaves behind, of another model than the quickstart's."""
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    names: dict = {}
    exec(example.replace("runs/quickstart", model), names)
    return names


def test_the_example_of_generate_runs(chat_model, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    names = run_the_example("README.md", chat_model)
    assert names["completion"].ids and (tmp_path / "export" / "model.safetensors").is_file()
    assert names["logits"].shape == (*names["tokens"].shape, names["model"].config.vocab_size)
    assert names["logits"].dtype == "float32"


def test_the_example_of_the_engine_runs(chat_model, capsys):  # noqa: F811
    names = run_the_example("docs/decoding.md", chat_model)
    assert names["exact"].completion.text in capsys.readouterr().out and names["paper"].done
