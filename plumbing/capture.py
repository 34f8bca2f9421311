"""A client's step as a CUDA graph, recorded once and replayed in all rounds by all clients. It is hundreds of
kernels of microseconds, and Python takes longer to launch them one by one than a GPU to compute them."""

from __future__ import annotations

import functools
import gc
import weakref
from pathlib import Path
from types import FunctionType

from plumbing.errors import UserError
from plumbing.optimizers import adopt, copy, memory_of
from plumbing.provenance import ROOT
from plumbing.settings import Args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

RECORDED = weakref.WeakKeyDictionary()  # {network: {code of a step: Recordings}}, gone with the network
side_stream = functools.cache(torch.cuda.Stream)  # of a GPU: libraries keep memory for each stream


def captured(args: Args, model: nn.Module, opt: torch.optim.Optimizer):
    """Decorator of a local step: tensors, also in lists and dicts, go in and come out. None on a CPU.

    A step changes `model` and `opt` in place, and nothing else. Besides its arguments it reads what does not
    change, or the run stops; a bool may change, each value has its own recording. The first step with
    arguments of new shapes is not recorded: libraries choose algorithms, the optimizer's state begins.
    """
    def decorate(step):
        if not is_recorded(args, step.__code__.co_filename):
            return step
        kept = RECORDED.setdefault(model, {}).setdefault(step.__code__, Recordings(args.device))
        form = form_of(opt)
        if form != (kept.optimizer or form):
            raise UserError("a recorded step has an optimizer of other parameters or values than in the "
                            "round before: make it as then, or add --capture off")
        kept.optimizer = form
        adopt(opt, kept.memory)
        parts = functools.cache(parts_of)

        @functools.wraps(step)
        def run(*given):
            defaults = step.__defaults__, *(step.__kwdefaults__ or {}).values()
            read = {"a default": seen("a default", defaults, parts)}
            for name, cell in zip(step.__code__.co_freevars, step.__closure__ or ()):
                if cell.cell_contents is not opt:
                    read[name] = seen(name, cell.cell_contents, parts)
            leaves, form = tree_flatten(given)
            key = (str(form), *(v for v in read.values() if isinstance(v, bool)), *map(kind, leaves))
            if key not in kept.inputs:
                inputs = tree_map_only(Tensor, lambda v: v.detach().to(args.device, copy=True), leaves)
                kept.inputs[key] = inputs
                result = kept.beside(lambda: step(*tree_unflatten(inputs, form)))
                kept.memory = memory_of(opt)
                return result
            inputs = kept.inputs[key]
            copy(inputs, leaves)
            if key not in kept.graphs:
                kept.graphs[key] = *kept.record(lambda: step(*tree_unflatten(inputs, form))), read
            replay, outputs, form, before = kept.graphs[key]
            for name in read:
                if read[name] != before[name]:
                    raise UserError(f"a recorded step reads {name}, which has changed since: make it a "
                                    "tensor among the step's arguments, or add --capture off")
            replay()
            results = tree_map_only(Tensor, torch.empty_like, outputs)
            copy(results, outputs)  # else the next replay would change them
            return tree_unflatten(results, form)
        return run
    return decorate


def is_recorded(args: Args, file: str) -> bool:
    """Whether the steps of a file are recorded; `auto` does so with this repository's files alone."""
    if args.capture == "auto" and (args.deterministic or ROOT not in Path(file).resolve().parents):
        return False
    return args.capture != "off" and args.device.startswith("cuda")


def kind(v):
    """What decides which recording an argument needs."""
    if isinstance(v, Tensor):
        return v.shape, v.dtype
    if v is None or isinstance(v, bool | str):
        return v
    raise UserError(f"a recorded step takes tensors and bools; found a {type(v).__name__}: make it a tensor, "
                    "or add --capture off")


def seen(name: str, value, parts):
    """What a step reads, in a form that shows a change. Stop if it could change without being seen."""
    if value is None or isinstance(value, bool | int | float | str | Args):
        return value
    if isinstance(value, list | tuple):
        return [seen(name, v, parts) for v in value]
    if isinstance(value, nn.Module):
        modules, tensors, numbers = parts(value)
        at = [(v.data_ptr(), v.requires_grad) for v in tensors]
        return [id(value), [module.training for module in modules], at, numbers]
    if isinstance(value, FunctionType) and not value.__closure__:
        return value.__code__, value.__defaults__, value.__kwdefaults__
    raise UserError(f"a recorded step reads {name}, a {type(value).__name__}: read what it needs before the "
                    "step, make tensors its arguments, or add --capture off")


def parts_of(net: nn.Module) -> tuple[list, list, list]:
    """The modules of a network, its tensors, and the modules' numbers, such as the p of a dropout. A client's
    steps look at the numbers once."""
    modules = [*net.modules()]
    numbers = [(name, v) for module in modules for name, v in vars(module).items()
               if isinstance(v, int | float | str) and name != "training"]
    return modules, [*net.parameters(), *net.buffers()], numbers


def form_of(opt: torch.optim.Optimizer) -> list:
    """What a recording has of an optimizer besides its rate and its state."""
    groups = [{name: v for name, v in group.items() if name not in ("params", "lr")}
              for group in opt.param_groups]
    return [type(opt), groups, [id(p) for group in opt.param_groups for p in group["params"]]]


class Recordings:
    """Of a step, by the kind of its arguments: the tensors they are copied into, and the graphs. All act
    on the rate and the state of one optimizer, which those of later rounds adopt."""

    def __init__(self, device: str):
        self.device, self.inputs, self.graphs, self.memory, self.pool = device, {}, {}, [], None
        self.optimizer = None

    def beside(self, step):
        """The step on a stream of its own, where a recording must be."""
        stream, current = side_stream(self.device), torch.cuda.current_stream(self.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            result = step()
        current.wait_stream(stream)
        return result

    def record(self, step):
        """A graph of the step: what replays it, and the tensors of its results with their form."""
        if not self.pool:  # one for all graphs: they never run at the same time, and results are copied
            gc.collect()
            torch.cuda.empty_cache()  # while it records PyTorch cannot free what it holds
            self.pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()

        def recording():
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                return step()
            finally:
                graph.capture_end()
        try:
            return graph.replay, *tree_flatten(self.beside(recording))
        except RuntimeError as e:
            first = e.__context__ if isinstance(e.__context__, RuntimeError) else e
            raise UserError(f"the step cannot be recorded on this GPU ({str(first).splitlines()[0][:100]}): "
                            "add --capture off")
