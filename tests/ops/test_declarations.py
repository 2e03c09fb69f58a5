"""Launches of our kernels with one argument of a wrong dtype or shape, or without one.

Tests of single operations do not repeat this: they have wrong arguments that no declaration finds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from llmq.base.dtypes import I32, U8, DType
from llmq.base.tensor import Tensor
from llmq.runtime.declaration import Arg
from llmq.runtime.device import DeviceSpec, Launch
from llmq.runtime.kernel import Kernel
from tools import compile_all

SPEC = DeviceSpec(name="", capability=90, num_sms=132, memory=0, library_workspace=1 << 20)
Launches = dict[Kernel, tuple]


@pytest.fixture(scope="module")
def launches() -> Launches:
    """The arguments of one launch of each kernel in training and generation on Hopper."""
    found: Launches = {}

    class ArgumentsDevice(compile_all.NotingDevice):
        def _launch(self, launch: Launch) -> None:
            super()._launch(launch)
            found.setdefault(launch.kernel, launch.args)

    noted: compile_all.Launches = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_all, "NotingDevice", ArgumentsDevice)
        for run in compile_all.all_runs(SPEC.capability):
            run.note(SPEC, noted)
    return found


def tensors(launches: Launches) -> Iterator[tuple[Kernel, tuple, int, Arg]]:
    """Each tensor of the launches: kernel, arguments, its place among these, its declaration."""
    for kernel, args in launches.items():
        for place, (arg, given) in enumerate(zip(kernel.declared, args, strict=True)):
            if isinstance(given, Tensor):
                yield kernel, args, place, arg


def changed(tensor: Tensor, dtype: DType | None = None, shape: tuple | None = None) -> Tensor:
    dtype, shape = dtype or tensor.dtype, shape or tensor.shape
    return Tensor(tensor.name, shape, dtype, tensor.storage, tensor.offset)


def refuses(kernel: Kernel, args: tuple, place: int, wrong: Tensor | None) -> bool:
    try:
        kernel.bind((*args[:place], wrong, *args[place + 1 :]))
    except (TypeError, ValueError) as error:
        return str(error).startswith(f"{kernel.entry}: ")
    return False


def test_wrong_dtypes_and_missing_tensors(launches):
    assert len(launches) > 140
    for kernel, args, place, arg in tensors(launches):
        other = changed(args[place], dtype=I32 if args[place].dtype == U8 else U8)
        assert refuses(kernel, args, place, other), (kernel.entry, arg.name)
        assert arg.optional or refuses(kernel, args, place, None), (kernel.entry, arg.name)


def test_wrong_shapes(launches):
    """A size that only one argument has is free, and tables of RoPE may be longer."""
    refused, accepted = 0, set()
    for kernel, args, place, arg in tensors(launches):
        given = [a for a, x in zip(kernel.declared, args, strict=True) if x is not None]
        names = Counter(n for a in given for d in a.shape or () for n in d.code.co_names)
        names.update(a.name for a in kernel.declared if not a.pointer)
        shape = args[place].shape
        for axis, dim in zip(range(-len(arg.shape), 0), arg.shape, strict=True):
            if dim.leading or any(names[name] < 2 for name in dim.code.co_names):
                continue
            larger = list(shape)
            larger[axis] += 1
            if refuses(kernel, args, place, changed(args[place], shape=tuple(larger))):
                refused += 1
            else:
                accepted.add(f"{kernel.entry} {arg.name} {dim.text}")
    assert refused > 1200
    assert {name for name in accepted if not name.startswith("rope_")} == set()
