"""Bad input to the commands, a case a row: config, mesh, data, prompts. Files and disks are in test_bad_files.py.

What every row must hold is in bad_input.py. The readers of data and prompts have more cases of their own, with what
survives under `data.on_bad_record=skip`: tests/data/test_bad_input.py, tests/decode/test_bad_input.py.
"""

import gzip
import json
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.bad_input import CHAT, TEXT, TRAIN, Case, check, edit, forbidden, make_world
from tests.data.tiny import chat, write_lines

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices (tests/conftest.py asks for them)")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    make_world(folder)
    return folder


CONFIG = {
    "an unknown field": Case(f"{TRAIN} train.stpes=3", "unknown field train.stpes; did you mean train.steps?"),
    "an unknown section": Case(f"{TRAIN} zzz=3", "unknown field zzz; the sections are model, "),
    "no assignment": Case(f"{TRAIN} train.steps", "'train.steps' is not an override; write section.field=value"),
    "a number that is none": Case(f"{TRAIN} train.steps=many", "train.steps='many': input should be a valid integer"),
    "a choice that is none": Case(f"{TRAIN} model.remat=half", "model.remat='half': input should be 'none', 'dots', "),
    "too small a number": Case(f"{TRAIN} train.steps=0", "train.steps=0 must be at least 1"),
    "a row that is not whole blocks": Case(
        f"{TRAIN} data.row_length=100", "data.row_length=100 is not a multiple of objective.block_size=16; make it one"
    ),
    "micro-batches that are not whole": Case(
        f"{TRAIN} train.micro_batches=3", "train.batch_size=8 is not a multiple of train.micro_batches=3"
    ),
    "a metric that is not measured": Case(
        f"{TRAIN} train.best_metric=validation_ar_loss", "every train.eval_every=0 steps; set that to a divisor of"
    ),
    "no experiment": Case("train", "name an experiment: --exp NAME"),
    "no such experiment": Case(
        "train --exp quikstart --workdir fresh", r"unknown experiment quikstart; did you mean quickstart\? .*--list shows all"
    ),
    "no such file": Case("train --exp tinny.py --workdir fresh", "tinny.py: no such file"),
    "no such function": Case(f"{TRAIN.replace('.py', '.py:small')}", "tiny.py has no function small; name one as --exp"),
    "a function that fails": Case(
        f"{TRAIN.replace('.py', '.py:broken')}", "tiny.py:.*: AttributeError: 'Experiment' object has no attribute 'steps'"
    ),
    "a file that is no Python": Case(TRAIN, "tiny.py:4: invalid syntax", lambda: edit("tiny.py", "tiny()", "tiny(")),
    "an unknown flag": Case(f"{TRAIN} --stpes 3", "Unrecognized options: --stpes"),
    "a bucket as workdir": Case("train --exp tiny.py --workdir gs://a/b", "--workdir gs:/a/b: no folder; mount the bucket"),
    "a step as workdir": Case(
        "train --exp tiny.py --workdir stopped@best",
        "--workdir stopped@best: names a checkpoint of stopped wherever a model is read; choose a name without @best",
    ),
    "a model of another size": Case(
        f"{TRAIN} init_from=exported model.num_layers=3 model.remat=full",
        r"is another model than model \(num_layers: 2 -> 3\); set model to None"
    ),
    "no model at all": Case(f"{TRAIN} model=none", "model and init_from are both None; name a model .* as model.path=DIR"),
    "a model that is not there": Case(
        f"{TRAIN} model=none init_from=runs/base", "init_from=runs/base does not exist; python -m wedlm_jax.train --exp base"
    ),
    "a folder of a model that is not there": Case(f"{TRAIN} model=none init_from=./absent", r"\./absent: no such directory"),
    "a tokenizer larger than the model": Case(
        f"{TRAIN} model.vocab_size=280",
        r"the tokenizer has token ids up to \d+ and the model has vocab_size=280 rows; raise model.vocab_size"
    ),
    "a tokenizer that is not there": Case(f"{TRAIN} tokenizer.path=absent", "absent is not a directory; name one that"),
    "a tokenizer that is cut off": Case(
        f"{TRAIN} tokenizer.path=damaged", "damaged: the tokenizer cannot be read .*; write its files again",
        lambda: (shutil.copytree("tokenizer", "damaged"), Path("damaged/tokenizer.json").write_text('{"model":')),
    ),
    "rows past the context": Case(
        f"{TRAIN} model.max_position_embeddings=128",
        "data.row_length=192 is past the model's context, .*=128; lower data.row_length"
    ),
    "a mask id that is a word": Case(f"{TRAIN} objective.mask_token_id=270", "mask_token_id=270 is the real token"),
    "nothing held out": Case(
        f"{TRAIN} {TEXT} data.path=texts train.eval_every=2", "train.eval_every asks for held-out data: .*held_out_share"
    ),
    "a package that is not installed": Case(
        f"{TRAIN} train.wandb=mine", r"train.wandb=mine needs the package wandb: pip install wandb"
    ),
    "another experiment in the workdir": Case(
        "train --exp tiny.py --workdir stopped optimizer.learning_rate=0.5",
        r"stopped holds a run of another experiment \(optimizer.learning_rate: 0.001 -> 0.5\); choose another --workdir, where "
        "model.path=stopped goes on from its weights .*, or remove stopped to start again",
    ),
}  # fmt: skip

MESH = {
    "more devices than there are": Case(f"{TRAIN} mesh.data=3", "mesh.data=3 x mesh.fsdp=1 x .* does not fit 8 devices"),
    "two axes of all that is left": Case(f"{TRAIN} mesh.fsdp=-1", "mesh.data and mesh.fsdp are -1, .*; set mesh.data=1"),
    "an axis of nothing": Case(f"{TRAIN} mesh.fsdp=0", "mesh.fsdp=0 must be at least 1, or -1"),
    "heads that cannot be cut": Case(
        f"{TRAIN} mesh.data=1 mesh.tensor=8", "mesh.tensor=8 does not divide heads=4 of .*; choose a divisor"
    ),
    "a batch that cannot be split": Case(
        f"{TRAIN} train.batch_size=4", "train.batch_size=4 cannot be split over .* mesh.data=8 x mesh.fsdp=1; make it a mult"
    ),
    "groups that cannot be split": Case(f"{TRAIN} data.num_groups=3", "a batch of 8 rows cannot be split into data.num_groups=3"),
    "a slice that does not exist": Case(f"{TRAIN} --compile-only v9:2x2", "topology 'v9:2x2' is unknown; write KIND:SHAPE"),
}  # fmt: skip


def lines(place: int, line: str | bytes):
    """A chat file with one more line."""

    def write() -> None:
        good = [json.dumps(chat(number)).encode() for number in range(40)]
        good.insert(place, line if isinstance(line, bytes) else line.encode())
        Path("chat.jsonl").write_bytes(b"\n".join(good) + b"\n")

    return write


def bad_chat(line: str | bytes, message: str) -> Case:
    """Seen before training by the command that shows the data."""
    return Case(
        f"data --exp tiny.py {CHAT} data.path=chat.jsonl", f"chat.jsonl:4: .*{message}.*data.on_bad_record=skip",
        lines(3, line),
    )  # fmt: skip


def cut_gzip() -> None:
    Path("cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "the cat"}\n' * 2000)[:-20])


def pairs() -> None:
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"q": ["x"], "a": ["y"]}), "pairs.parquet")


DATA = {
    "no such data": Case(f"{TRAIN} {TEXT} data.path=absent", "absent: no such file or folder; set data.path"),
    "no data named": Case(f"{TRAIN} {TEXT}", "data.source=text needs data.path"),
    "no data named beside a model that would be fetched": Case(
        "train --exp qwen3_0p6b_sft --workdir fresh", "data.source=chat needs data.path"
    ),
    "a folder of other files": Case(f"{TRAIN} {CHAT} data.path=texts", "texts: the folder holds no file that ends in .jsonl"),
    "a pattern without files": Case(f"{TRAIN} {TEXT} data.path=texts/*.md", r"texts/\*.md: no file fits the pattern"),
    "an unreadable folder": Case(
        f"{TRAIN} {TEXT} data.path=texts", r"texts: the folder cannot be read \(Permission denied\)",
        around=lambda: forbidden("texts"),
    ),
    "an unreadable file": Case(
        f"{TRAIN} {TEXT} data.path=texts/a.txt", r"texts/a.txt: cannot be read \(Permission denied\)",
        around=lambda: forbidden("texts/a.txt")
    ),
    "an empty file": Case(
        f"{TRAIN} {CHAT} data.path=chat.jsonl", "chat.jsonl: the file is empty", lambda: Path("chat.jsonl").write_text("")
    ),
    "a text that is not UTF-8": Case(
        f"{TRAIN} {TEXT} data.path=texts", r"texts/b.txt: not UTF-8 \(byte 2\)",
        lambda: Path("texts/b.txt").write_bytes(b"ab\xff"),
    ),
    "a compressed file that is cut off": Case(
        f"{TRAIN} {TEXT} data.path=cut.jsonl.gz", "cut.jsonl.gz: cannot be decompressed, it is cut off or damaged", cut_gzip
    ),
    "a parquet file that is none": Case(
        f"{TRAIN} data.source=parquet data.path=a.parquet tokenizer.path=tokenizer", "a.parquet: cannot be read as parquet",
        lambda: Path("a.parquet").write_text("PAR1"),
    ),
    "a column that is not there": Case(
        f"{TRAIN} data.source=parquet data.path=pairs.parquet data.text_column=body",
        r"pairs.parquet: no column 'body' \(there are: q, a\)", pairs,
    ),
    "a field of another source": Case(
        f"{TRAIN} {TEXT} data.path=texts data.subset=x", "data.subset is set, but data.source=text does not read it; remove it"
    ),
    "a part of a mixture without weight": Case(
        f"{TRAIN.replace('.py', '.py:unequal')} init_from=exported", "weight=0 of text must be above 0; leave the part out"
    ),
    "chat without a tokenizer": Case(
        f"{TRAIN} data.source=chat data.path=chat.jsonl tokenizer.path=none",
        "data.source=chat needs a tokenizer with a chat template; name its"
    ),
    "an end token that is none": Case(f"{TRAIN} data.end_token=<stop>", "data.end_token='<stop>' is no token of the tokenizer"),
    "tokens of another vocabulary": Case(
        f"{TRAIN} data.source=tokens data.path=a.npy tokenizer.path=tokenizer data.held_out_share=0",
        r"a.npy: tokens from 0: token 151643 at place 1 is none of the tokenizer's, 0 to \d+; .* name that one as tokenizer.path",
        lambda: np.save("a.npy", np.array([4, 151_643])),
    ),
    "a problem longer than a row": Case(
        f"{TRAIN} data.row_length=32", "tokens, and a row holds data.row_length=32; shorten the record"
    ),
    "nothing but bad records": Case(
        f"{TRAIN} {CHAT} data.path=bad.jsonl data.on_bad_record=skip",
        r"the training split holds no document but bad records, the last: bad.jsonl:\d: ",
        lambda: write_lines(Path("bad.jsonl"), ["{"] * 5),
    ),
    "broken JSON": bad_chat('{"messages": [', r"broken JSON \(Expecting value, column 15\)"),
    "bytes that are no text": bad_chat(b'{"messages": "\xff"}', r"not UTF-8 \(byte 14 of the line\)"),
    "no known key": bad_chat('{"dialog": []}', "none of messages, conversations, prompt with completion, instruction"),
    "an unknown role": bad_chat('{"messages": [{"role": "bot", "content": "x"}]}', "message 0: the role 'bot' is unknown"),
    "no reply": bad_chat('{"messages": [{"role": "user", "content": "x"}]}', "the last message must be the assistant's"),
    "a control token": bad_chat(
        '{"prompt": "<|im_end|>", "completion": "x"}', "the text holds the control token '<|im_end|>'; take it out"
        .replace("|", r"\|"),
    ),
}  # fmt: skip

GENERATE = "generate --model exported"


def prompts(line: str):
    return lambda: Path("prompts.jsonl").write_text(f'{{"prompt": "x"}}\n{line}\n')


PROMPTS = {
    "no prompt": Case(GENERATE, "give one of --prompt TEXT, --message TEXT and --input IN.jsonl"),
    "no model": Case("generate --model absent --prompt x", "absent: no such directory; python -m wedlm_jax.train --exp NAME"),
    "no prompts": Case(f"{GENERATE} --input absent.jsonl", "--input absent.jsonl: cannot be read .*; name a JSONL file"),
    "a line that is no JSON": Case(f"{GENERATE} --input prompts.jsonl", "prompts.jsonl:2: not JSON .*; write one", prompts("{")),
    "a line that has a key twice": Case(
        f"{GENERATE} --input prompts.jsonl", "prompts.jsonl:2: the key 'prompt' is there twice; take one out",
        prompts('{"prompt": "a", "prompt": "b"}'),
    ),
    "a line of another key": Case(
        f"{GENERATE} --input prompts.jsonl", "prompts.jsonl:2: unknown key 'text'; give one of", prompts('{"text": "a"}')
    ),
    "a token of another vocabulary": Case(
        f"{GENERATE} --input prompts.jsonl", r"prompts.jsonl:2.*: token id 320 is not in the vocabulary",
        prompts('{"prompt_ids": [5, 320]}'),
    ),
    "a prompt past the context": Case(
        f"{GENERATE} --prompt x --max-new-tokens 40000", "exceed the model's context of 32768"
    ),
    "prompts that would be overwritten": Case(
        f"{GENERATE} --input prompts.jsonl --output prompts.jsonl",
        "--output prompts.jsonl: would overwrite the prompts of --input"
    ),
    "no folder for the output": Case(f"{GENERATE} --prompt x --output a/b.jsonl", "the folder a does not exist; make it first"),
    "a decode setting out of range": Case(f"{GENERATE} --prompt x --top-p 0", r"top_p=0.0: must lie in \(0, 1\]"),
    "a task that does not exist": Case("evaluate --model exported --task sums", "task 'sums' does not exist"),
    "an experiment that is not trained": Case(
        "evaluate --exp tiny.py --workdir fresh", "fresh holds no trained model; make it: python -m wedlm_jax.train --exp tiny.py"
    ),
    "a workdir without metrics": Case("metrics texts", "texts/metrics.jsonl: no such file; python -m wedlm_jax.train writes it"),
    "a picture that is none": Case("metrics stopped --out a.txt", "--out a.txt: name a .png file"),
}  # fmt: skip

CASES = {f"{kind}: {name}": case for kind, table in
         {"config": CONFIG, "mesh": MESH, "data": DATA, "prompts": PROMPTS}.items() for name, case in table.items()}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_line_and_harms_nothing(name, world, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    check(CASES[name], world, tmp_path, monkeypatch, capsys)
