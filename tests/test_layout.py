"""The rules that keep the tree readable: same names, downward imports, sizes, README's table."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "llmq"
LIBRARY_OPS = {"matmul"}  # no .cu of their own: cuBLASLt
CU_LABELS = ("Data", "Launch", "Cost", "Needs", "Same name")
GPU_MODULES = {"cupy", "cupy_backends", "cuda", "nvmath", "cudnn"}

# A module may import modules of a lower rank; of its own rank only where the package allows it.
RANKS: list[set[str]] = [
    {"errors", "dtypes", "schedule"},
    {"hf_config", "option_types", "option_file", "files", "records", "child"},
    {"config", "tokens"},
    {"presets", "option_fields", "tokenizer", "documents"},
    {"option_warnings"},
    {"options"},
    {"command_line"},
    {"runtime", "ref", "safetensors_file", "options_io", "loader", "token_shards", "json_log"},
    {"ops", "params", "tokenize", "cards"},
    {"linear", "hf", "machine", "sol"},
    {"mirrors", "norm", "scales", "quants", "residuals"},
    {"operands", "activations"},
    {"embedding", "block", "weights", "grads", "checkpoint"},
    {"head", "optimizer", "decode", "checkpoint_store"},
    {"model", "sample"},
    {"step"},
    {"plan", "metrics", "monitor", "shards"},
    {"live", "plot", "watch", "ranks", "cost"},
    {"estimate"},
    {"shrink"},
    {"advice"},
    {"trainer", "diagnose", "fit"},
    {"announce", "scaling", "plan_command"},
    {"training", "measure"},
    {"demo", "bench", "verify"},
    {"cli_options"},
    {"cli"},
    {"__init__"},
    {"__main__"},
]
RANK = {name: rank for rank, names in enumerate(RANKS) for name in names}
INSIDE = {"runtime", "ops", "ref"}  # packages whose modules may import `common` or each other


def stems(folder: str, pattern: str) -> set[str]:
    return {p.stem for p in (ROOT / folder).glob(pattern)} - {"__init__", "common"}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def unit(path: Path) -> str:
    """The name under which a module has its rank: its package, or itself at the top level."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def imports(path: Path) -> list[str]:
    """Dotted names that a module imports, anywhere in it."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.module == "llmq":
                names += [f"llmq.{alias.name}" for alias in node.names]
            else:
                names.append(node.module)
    return names


def test_every_operation_has_its_five_files():
    ops = stems("llmq/ops", "*.py")
    assert ops == stems("llmq/ref", "*.py")
    assert ops - LIBRARY_OPS == stems("llmq/cu", "*.cu")
    tests = {name.removeprefix("test_") for name in stems("tests/ops", "test_*.py")}
    assert ops == tests
    tests = {name.removeprefix("test_") for name in stems("tests/ref", "test_*.py")}
    assert ops == tests


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_downward(path):
    own = unit(path)
    assert own in RANK, f"{own} has no rank: add it to RANKS"
    for name in imports(path):
        top = name.split(".")[0]
        if top in GPU_MODULES:
            assert own == "runtime", f"only llmq/runtime imports {top}"
        if top != "llmq" or name == "llmq":
            continue
        other = name.split(".")[1]
        if other == "__version__":
            continue
        if other == own and own in INSIDE:
            inner = name.split(".")[2] if name.count(".") > 1 else ""
            assert own == "runtime" or inner == "common", f"{path}: {name} is a sibling"
        else:
            assert RANK[other] < RANK[own], f"{own} may not import {other}"


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_sizes_of_python(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            length = node.end_lineno - node.lineno + 1
            assert length <= 60, f"{node.name} has {length} lines"


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("cu/*.cu*")), ids=lambda p: p.name)
def test_cuda_sources(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 600
    if path.name != "ptx.cuh":
        assert not re.search(r"\basm\b", text), "inline PTX belongs in ptx.cuh"
    if path.suffix == ".cu":
        header = text[: text.index("#include")]
        for label in CU_LABELS:
            assert re.search(rf"^//\s+{label}\b", header, re.MULTILINE), f"header lacks {label}"


def test_gpu_libraries_are_not_imported_at_the_top_level():
    for path in modules():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                names += [node.module] if isinstance(node, ast.ImportFrom) else []
                assert not GPU_MODULES & {n.split(".")[0] for n in names}, path


def test_readme_lists_the_packages():
    """Rooms that are still to be built may be listed before they exist."""
    readme = (ROOT / "README.md").read_text()
    table = readme[readme.index("| package |") : readme.index("| variable |")]
    listed = set(re.findall(r"^\| `([\w/]+)` \|", table, re.MULTILINE))
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} <= listed


def test_nothing_names_a_machine_of_ours():
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*"), *modules(), *ROOT.glob("tools/*")]:
        if path.is_file():
            assert not re.search(r"/work/|pypi\.org", path.read_text()), path
