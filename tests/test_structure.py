"""The tree reads as it is drawn: imports point down, files stay small, names say what they hold."""

import ast
import graphlib
import re
import sys
from collections.abc import Container, Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGE = "wedlm_jax"
LONGEST_FILE = 350  # lines; a longer one holds two concepts

# A room (a folder or a module of the package) imports from the floors below its own.
FLOORS = (
    {"errors", "host_memory", "version"},
    {"config_tree", "flags", "lifeline", "program_costs", "results"},
    {"distributed"},
    {"damaged_checkpoint", "kept_checkpoints", "ops", "preemption", "sole_writer"},
    {"sharding"},
    {"model", "diffusion", "data"},
    {"objective"},
    {
        *("optimizer", "train_state", "mask_training", "step_metrics", "train_step"),
        *("hf", "model_file", "checkpoint", "metrics", "decode"),
    },
    {"model_path"},
    {"engine", "pretrained", "baselines", "absent_devices"},
    {"evals", "model_flags", "study", "train_config"},
    {"experiment"},
    {"resuming", "same_run", "workdir"},
    {"__init__", "generate", "chat", "serve"},  # the public surface
    {"ahead_of_time", "data_progress", "self_generation"},
    {"train", "evaluate", "bench", "tradeoff", "cacheability", "open_ended", "convert", "calibrate", "data.__main__"},
)
FLOOR_OF = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}

# Every import between two rooms of one floor, and why.
ON_ONE_FLOOR = {
    ("errors", "version"),  # every command answers --version
    ("train_step", "optimizer"),  # the update
    ("train_step", "train_state"),
    ("train_step", "step_metrics"),
    ("train_step", "mask_training"),  # the gradients of an adapter of mask rows
    ("train_state", "optimizer"),  # holds its state
    ("checkpoint", "train_state"),  # what is saved
    ("checkpoint", "model_file"),  # the shapes of it
    ("__init__", "generate"),  # wedlm_jax.generate is the function
}

Imports = dict[str, set[str]]  # module -> the modules of the package that it imports


def read_imports(package: Path) -> Imports:
    modules = _modules(package)
    return {name: set(_package_imports(file, package.name, modules)) for name, file in modules.items()}


def _modules(package: Path) -> dict[str, Path]:
    def name(file: Path) -> str:
        parts = file.relative_to(package.parent).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    return {name(file): file for file in sorted(package.rglob("*.py"))}


def _package_imports(file: Path, package: str, modules: Container[str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if _top(alias.name) == package)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: a relative import; write the whole path"
            if _top(node.module) == package:
                # `from package import module` names a module, `from module import name` does not.
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    yield inner if inner in modules else node.module


def _top(module: str) -> str:
    return module.split(".")[0]


def _room(module: str) -> str:
    """The first name below the package; a command of a lower room, `room.__main__`, has a floor of its own."""
    name = module.partition(".")[2]
    return name if name in FLOOR_OF else _top(name) or "__init__"


def _upward(imports: Imports) -> list[str]:
    """One line for each import that does not point down, and for each room that has no floor."""
    faults = []
    for module, targets in sorted(imports.items()):
        room = _room(module)
        if room not in FLOOR_OF:
            faults.append(f"{module}: the room {room} has no floor; add it to FLOORS")
            continue
        for target in sorted(targets):
            other = _room(target)
            if other == room or (room, other) in ON_ONE_FLOOR:
                continue
            if FLOOR_OF.get(other, len(FLOORS)) >= FLOOR_OF[room]:
                faults.append(f"{module} imports {target}, which is not below it")
    return faults


@pytest.fixture(scope="module")
def imports() -> Imports:
    return read_imports(REPOSITORY / PACKAGE)


def test_imports_point_down(imports):
    assert _upward(imports) == []


def test_no_import_goes_in_a_circle(imports):
    list(graphlib.TopologicalSorter(imports).static_order())  # raises CycleError, naming the modules


def test_every_import_listed_for_one_floor_exists(imports):
    edges = {(_room(module), _room(target)) for module, targets in imports.items() for target in targets}
    assert edges >= ON_ONE_FLOOR


@pytest.mark.parametrize(
    ("file", "line", "fault"),
    [
        (
            "ops/attention.py",
            "from wedlm_jax.model import rope",
            "wedlm_jax.ops.attention imports wedlm_jax.model.rope",
        ),
        ("model/rope.py", "import wedlm_jax.data.packing", "wedlm_jax.model.rope imports wedlm_jax.data.packing"),
        (
            "evals/sweep.py",
            "from wedlm_jax.experiment import load",
            "wedlm_jax.evals.sweep imports wedlm_jax.experiment",
        ),
        (
            "hf/weights.py",
            "def f():\n    from wedlm_jax import decode",
            "wedlm_jax.hf.weights imports wedlm_jax.decode",
        ),
        ("attic.py", "", "the room attic has no floor"),
    ],
)
def test_an_import_that_points_up_is_found(file, line, fault, tmp_path):
    for name in (
        "__init__",
        "ops/attention",
        "model/rope",
        "data/packing",
        "evals/sweep",
        "hf/weights",
        "decode/__init__",
    ):
        (tmp_path / PACKAGE / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / PACKAGE / f"{name}.py").touch()
    (tmp_path / PACKAGE / file).write_text(line)
    faults = _upward(read_imports(tmp_path / PACKAGE))
    assert len(faults) == 1 and fault in faults[0]


def test_experiments_import_only_the_experiment_module():
    allowed = {f"{PACKAGE}.experiment"}
    for file in sorted((REPOSITORY / "experiments").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name in allowed or _top(name) in sys.stdlib_module_names, f"{file}:{node.lineno}: imports {name}"


def test_no_file_is_longer_than_one_concept():
    lengths = {name: len(file.read_text().splitlines()) for name, file in _modules(REPOSITORY / PACKAGE).items()}
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST_FILE} == {}


def test_no_drawer_without_a_concept():
    drawer = re.compile(r"(util|helper|common|misc)s?$")
    folders = ("wedlm_jax", "experiments", "tests", "benchmarks", "launch")
    paths = (path for folder in folders for path in (REPOSITORY / folder).rglob("*") if "fixtures" not in path.parts)
    assert [str(path) for path in paths if drawer.search(path.stem)] == []


def test_nothing_is_left_for_later():
    mark = re.compile(r"\b(TODO|FIXME|XXX)\b")
    folders = ("wedlm_jax", "experiments", "benchmarks", "launch")
    files = (f for folder in folders for f in (REPOSITORY / folder).rglob("*") if f.suffix in {".py", ".sh"})
    assert [str(file) for file in files if mark.search(file.read_text(encoding="utf-8"))] == []


PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md")), REPOSITORY / "launch" / "README.md"]


def _anchors(page: Path) -> set[str]:
    headings = (line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("#"))
    return {"-".join(re.findall(r"\w+", heading.lower())) for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_a_page_links_to_what_exists(page):
    """`[`name`](file.py)` to what defines the name, `[words](page.md#heading)` to a heading of it."""
    for code, name, target in re.findall(
        r"\[(`?)([^\]`]*)`?\]\((?!https?:)([^)]+)\)", page.read_text(encoding="utf-8")
    ):
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in _anchors(file), f"{page.name} links to {target}"
        if code:
            defined = rf"^\s*(def|class) {name}\b"
            assert re.search(defined, file.read_text(encoding="utf-8"), re.MULTILINE), f"{target} has no {name}"


def test_the_readme_leads_to_every_page():
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    pages = [page.name for page in PAGES if page.parent == REPOSITORY / "docs"]
    assert [name for name in pages if f"(docs/{name})" not in readme] == []
