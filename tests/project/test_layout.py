"""The rules that keep the tree readable: same names, downward imports, sizes, README's tree."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from functools import cache
from pathlib import Path

import pytest

from llmq.ops.product.routes import ROUTES
from llmq.ref.product.matmul_fused import CASES
from llmq.runtime.device import FUSED
from llmq.runtime.host_device import reference
from llmq.runtime.kernel import Kernel
from tools import prose

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "llmq"
CU_LABELS = ("Data", "Launch", "Cost", "Needs")
GPU_MODULES = {"cupy", "cupy_backends", "cuda", "nvmath", "cudnn"}

# Packages from the lowest to the highest: a module imports only from its own one and those before.
# Operations do not import each other, and neither do their references: only `common`. CHOOSING are
# no operations: they choose among those that compute a product and what follows it.
ROOMS = [
    "base", "runtime", "comm", "arch", "options", "report", "ref", "ops", "formats", "data",
    "text", "state", "model", "checkpoint", "plan", "run", "bench", "rig", "commands",
]  # fmt: skip
TOP = {"__init__", "__main__"}
SINGLE = {"ops", "ref"}
CHOOSING = ("ops.product.product", "ops.product.routes")


def stems(folder: str, pattern: str) -> set[str]:
    """The files in the rooms of a folder, without their endings: product/matmul."""
    paths = (p.relative_to(ROOT / folder) for p in (ROOT / folder).glob(f"*/{pattern}"))
    return {path.with_suffix("").as_posix() for path in paths if path.stem != "__init__"}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room(name: str) -> str:
    """The package of a module, whose dotted name below llmq is given, or of a package itself."""
    first, *inner = name.split(".")
    return f"{first}.{inner[0]}" if inner and f"{first}.{inner[0]}" in ROOMS else first


def name_of(path: Path) -> str:
    """The dotted name of a module below llmq."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


@cache
def tree(path: Path) -> ast.Module:
    """The module, parsed once."""
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> list[str]:
    """Dotted names that a module imports, anywhere in it; of `from a import b` it is a.b."""
    names = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def graph() -> dict[str, set[str]]:
    """The modules of llmq that each of its modules imports, both below llmq."""
    there = {name_of(path).removesuffix(".__init__") for path in modules()}
    found = {}
    for path in modules():
        inner = [n.removeprefix("llmq.") for n in imports(path) if n.startswith("llmq.")]
        both = {n if n in there else n.rpartition(".")[0] for n in inner}
        found[name_of(path).removesuffix(".__init__")] = both & there
    return found


def test_every_operation_has_its_five_files():
    ops = stems("llmq/ops", "*.py") - {
        name.removeprefix("ops.").replace(".", "/") for name in CHOOSING
    }
    assert ops == stems("llmq/ref", "*.py")
    assert ops == stems("llmq/cu", "*.cu")
    for folder in ("tests/ops", "tests/ref"):  # and more, where its kernels are of several kinds
        assert ops <= {name.replace("/test_", "/") for name in stems(folder, "test_*.py")}


def test_references_take_what_their_kernels_declare():
    """Under the same names, in the same order: their types are those of the declaration."""
    for name in sorted(stems("llmq/ops", "*.py") | {"common"}):
        module = importlib.import_module(f"llmq.ops.{name.replace('/', '.')}")
        for kernel in (value for value in vars(module).values() if isinstance(value, Kernel)):
            parameters = inspect.signature(reference(kernel)).parameters.values()
            named = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
            declared = [argument.name for argument in kernel.declared]
            if any(p.kind is p.VAR_POSITIONAL for p in parameters):
                declared = declared[: len(named)]
            assert named[: len(declared)] == declared, kernel.entry


def test_imports_point_downward():
    for path in modules():
        own = room(name_of(path))
        assert own in ROOMS or own in TOP, f"{own} has no place in ROOMS"
        for name in imports(path):
            top, _, inner = name.partition(".")
            if top in GPU_MODULES:
                assert own in {"runtime", "comm"}, f"{path}: only runtime and comm import {top}"
            if top != "llmq" or own in TOP or inner == "__version__":
                continue
            other = room(inner)
            if other == own and own in SINGLE and name_of(path) not in CHOOSING:
                assert inner.split(".")[1] == "common", f"{path}: {name} is a sibling"
            assert ROOMS.index(other) <= ROOMS.index(own), f"{path} may not import {name}"


def test_products_are_chosen_in_one_place():
    """Nobody else launches a product of ours, or asks for one by a device's `fused`."""
    assert {route.kernel for route in ROUTES.values()} == set(FUSED) == set(CASES)
    needing = [name for name, needs in graph().items() if "ops.product.matmul_fused" in needs]
    assert needing == [*CHOOSING]
    asking = [p for p in modules() if re.search(r"dev(ice)?\.fused\b", p.read_text())]
    assert [name_of(path) for path in asking] == ["ops.product.routes"]


def test_no_import_circles():
    left = graph()
    while free := {name for name, needs in left.items() if not needs & left.keys() - {name}}:
        left = {name: needs for name, needs in left.items() if name not in free}
    assert not left, f"these modules import each other in circles: {sorted(left)}"


def test_packages_say_what_they_are_for():
    for name in ROOMS:
        lines = ast.get_docstring(tree(PACKAGE / name.replace(".", "/") / "__init__.py"))
        assert lines is not None and len(lines.splitlines()) >= 3, name


def test_sizes_of_python():
    for path in modules():
        assert len(path.read_text().splitlines()) <= 600, path
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef):
                length = node.end_lineno - node.lineno + 1
                assert length <= 60, f"{path}: {node.name} has {length} lines"


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("cu/**/*.cu*")), ids=lambda p: p.name)
def test_cuda_sources(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 600
    if path.name != "ptx.cuh":
        assert not re.search(r"\basm\b", text), "inline PTX belongs in ptx.cuh"
    if path.suffix == ".cu":
        header = text[: text.index("#include")]
        for label in CU_LABELS:
            assert re.search(rf"^//\s+{label}\b", header, re.MULTILINE), f"header lacks {label}"


def test_docstrings_and_comments_are_sentences():
    for path in [*modules(), *ROOT.glob("tools/**/*.py"), *ROOT.glob("tests/**/*.py")]:
        assert not prose.fragments(path), f"{path}: run tools/prose.py"


def test_gpu_libraries_are_not_imported_at_the_top_level():
    for path in modules():
        for node in tree(path).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                names += [node.module] if isinstance(node, ast.ImportFrom) else []
                assert not GPU_MODULES & {n.split(".")[0] for n in names}, path


def test_readme_lists_the_packages():
    """In the order of ROOMS; cu, which has no modules, beside."""
    readme = (ROOT / "README.md").read_text()
    table = readme[readme.index("| package |") :]
    listed = re.findall(r"^\| `([\w/]+)` \|", table, re.MULTILINE)
    assert [name.replace("/", ".") for name in listed if name != "cu"] == ROOMS


def test_nothing_names_a_machine_of_ours():
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*"), *modules(), *ROOT.glob("tools/*")]:
        if path.is_file():
            assert not re.search(r"/work/|pypi\.org", path.read_text()), path
