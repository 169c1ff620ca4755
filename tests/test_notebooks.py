"""The notebooks run from top to bottom, with a tiny model in the place of Qwen3."""

import copy
import dataclasses
import json
import re
import runpy
import shlex
import sys
import types
from pathlib import Path

import pytest

import wedlm_jax
from tests.conftest import FULL
from tests.evals.models import tiny_model
from wedlm_jax import save

FOLDER = Path(__file__).parents[1] / "launch" / "notebooks"
TINY = {"CONVERSATIONS": 60, "STEPS": 2, "ROWS": 8, "ROW_LENGTH": 128, "NEW_TOKENS": 4}
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def code_cells(name: str) -> list[dict]:
    return [cell for cell in json.loads((FOLDER / name).read_text())["cells"] if cell["cell_type"] == "code"]


def tags(cell: dict) -> list[str]:
    return cell["metadata"].get("tags", [])


@pytest.fixture
def chat_model(tmp_path):
    model = dataclasses.replace(tiny_model(), tokenizer=copy.deepcopy(tiny_model().tokenizer))
    model.tokenizer.chat_template = CHATML
    save(model, tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture
def run(chat_model, tmp_path, monkeypatch):
    """run(notebook): executes its cells in a folder of their own; returns what they define, and the pictures they show."""
    monkeypatch.chdir(tmp_path)
    pictures: list[bytes] = []
    display = types.SimpleNamespace(Image=lambda path: pictures.append(Path(path).read_bytes()))
    monkeypatch.setitem(sys.modules, "IPython.display", display)

    def execute(notebook):
        return execute_cells(notebook, chat_model, monkeypatch), pictures

    return execute


def execute_cells(notebook, chat_model, monkeypatch) -> dict:
    names: dict = {}
    for cell in code_cells(notebook):
        if "install" in tags(cell):
            continue
        lines = "".join(cell["source"]).replace("\\\n", " ").splitlines()
        commands = [line.removeprefix("!") for line in lines if line.startswith("!")]
        exec("\n".join(line for line in lines if not line.startswith("!")), names)
        if "parameters" in tags(cell):
            assert names.keys() >= TINY.keys()
            names |= {
                name: value
                for name, value in (TINY | {"RANK": 2, "SAMPLES": 0, "ARCH": "qwen3"}).items()
                if name in names
            }
            names["MODEL"] = chat_model
        for command in commands:
            python, dash_m, module, *arguments = shlex.split(command.format(**names))
            assert (python, dash_m) == ("python", "-m")
            monkeypatch.setattr(sys, "argv", [module, *arguments])
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    return names


def test_every_cell_of_the_colab_notebook_runs(run, tmp_path, capsys):
    names, pictures = run("colab.ipynb")
    assert names["forwards"]["ar"] == 1.0 and names["forwards"].keys() == {"ar", "verified", "streaming"}
    assert pictures[0].startswith(b"\x89PNG")
    assert (tmp_path / "export" / "model.safetensors").is_file()
    assert re.search(r"verified: \d", capsys.readouterr().out)


def test_the_adapter_notebook_decodes_without_thinking_as_it_learned(monkeypatch):
    """Of a Qwen3 that thinks, the base and the adapter would be set to write what the adapter never saw."""
    loaded = []
    stats = types.SimpleNamespace(tokens_per_forward=1.0)
    completion = types.SimpleNamespace(stats=stats, ids=[1], text="8")
    monkeypatch.setattr(wedlm_jax, "load", lambda path, **flags: loaded.append(flags))
    monkeypatch.setattr(wedlm_jax, "generate", lambda *_: [completion])
    (cell,) = [cell for cell in code_cells("adapter.ipynb") if "wedlm_jax.load" in "".join(cell["source"])]
    exec("".join(cell["source"]), {"MODEL": "base", "NEW_TOKENS": 4})
    assert [flags["chat_template_kwargs"] for flags in loaded] == [{"enable_thinking": False}] * 2


@pytest.mark.skipif(not FULL, reason="trains as test_adapter_training.py does; launch/test.sh --full")
def test_every_cell_of_the_adapter_notebook_runs_and_the_answers_are_the_same(run, tmp_path, capsys):
    names, pictures = run("adapter.ipynb")
    assert names["forwards"]["ar"] == 1.0 and names["texts"]["verified"] == names["texts"]["ar"]
    assert pictures[0].startswith(b"\x89PNG")
    written = {file.name for file in (tmp_path / "adapter").iterdir()}
    assert {"adapter.json", "adapter_model.safetensors", "tokenizer.json"} <= written and "config.json" not in written
    assert "the same text: True" in capsys.readouterr().out


def test_the_notebook_for_tpus_is_the_same_but_for_installation_and_sizes():
    colab, tpu = ([c["source"] for c in code_cells(n) if not tags(c)] for n in ("colab.ipynb", "tpu_vm.ipynb"))
    assert colab == tpu


@pytest.mark.parametrize("name", ["adapter.ipynb", "colab.ipynb", "tpu_vm.ipynb"])
def test_notebooks_hold_no_output_and_say_what_was_run(name):
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code_cells(name))
    assert "Not run by us on this hardware" in (FOLDER / name).read_text()


@pytest.mark.parametrize("name", ["adapter.ipynb", "colab.ipynb", "tpu_vm.ipynb"])
def test_the_package_can_be_imported_in_the_kernel_that_installed_it(name):
    """An editable install is a .pth file, which a Python reads while it starts; until then the folder of the clone, which has no
    __init__.py, is taken for the package."""
    (install,) = [line for cell in code_cells(name) for line in cell["source"] if line.startswith("%pip")]
    flags = [word for word in shlex.split(install) if word.startswith("-")]
    assert flags == ["-q"] and re.search(r"'\./wedlm_jax\[\w+\]'$", install)


@pytest.mark.parametrize("name", ["adapter.ipynb", "colab.ipynb", "tpu_vm.ipynb"])
def test_the_devices_are_shown_by_a_process_that_does_not_keep_them_from_the_training(name):
    (install,) = [cell for cell in code_cells(name) if "install" in tags(cell)]
    assert shlex.split(install["source"][-1]) == ["!python", "-c", "import jax; print(jax.devices())"]
