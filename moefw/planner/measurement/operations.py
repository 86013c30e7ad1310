"""The operators of a recorded micro-batch: matrix products, bytes of all others, collectives.

They are those that the parts mean, on a GPU. Where this machine has no kernel, or only emulates a format, what runs in
its place is not what counts (:mod:`moefw.runtime.accounting`, :mod:`moefw_kernels.in_place`): codes are multiplied as
codes, a block of operators in the place of a kernel is one, heads have their own widths, and rows that only fill up
groups or a budget are no rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, Final, TypeVar, final

import torch
import torch.distributed as dist
from attrs import Factory, define, evolve, frozen
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from moefw.core.contracts import Layout
from moefw.core.stages import ExpertBatch
from moefw.planner.report import AGAIN, OnHost, Product, Transfer, Updated, Work
from moefw.recording.collectives import WAIT, collective_of
from moefw.recording.places import Place
from moefw.recording.recorder import Life, Recorder
from moefw.recording.tensors import tensors_in
from moefw.runtime.accounting import Codes, Core, account
from moefw.runtime.parallel.holders import STAGE
from moefw.runtime.parallel.meshes import COPIES
from moefw_kernels.in_place import Launch, launch

T = TypeVar("T")
aten = torch.ops.aten
_FIRST_FACTOR: Final[Mapping[Any, int]] = {
    **dict.fromkeys((aten.mm, aten.bmm, aten._grouped_mm, aten._scaled_mm, aten._scaled_grouped_mm), 0),
    **dict.fromkeys((aten.addmm, aten.addmm_, aten.baddbmm, aten.baddbmm_), 1),
}
"""Operators that multiply two matrices, or groups of them, and the position of the first one."""
_ATTENTION: Final = aten._scaled_dot_product_flash_attention_for_cpu
_ATTENTION_BACKWARD: Final = aten._scaled_dot_product_flash_attention_for_cpu_backward
_EXPERTS: Final = "experts"
"""The region whose function is given the rows of experts."""
_UNWRITTEN: Final = (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided)
_INTO_THE_GATHERED: Final = "fsdp::all_gather_copy_in"
"""Writes of its output, which has room for all ranks, only the place of this rank."""
_COPIES: Final = (aten.copy_, aten._to_copy, aten.clone)
_LOOKUPS: Final = (aten.embedding, aten.gather, aten.index, aten.index_select)
"""Operators that read of their first tensor only what they return."""


@define
class _Done:
    """Operators that ran in one place. ``operators`` and ``nbytes``: number and bytes of all but the products."""

    products: Counter[Product] = Factory(Counter)
    transfers: Counter[Transfer] = Factory(Counter)
    operators: int = 0
    nbytes: int = 0
    on_host: OnHost = OnHost()
    updated: Updated = Updated()


@frozen(kw_only=True)
class _Group:
    """Ranks of a collective: its name, and the positions of this rank's peers in its node and in other nodes.

    ``span``: from the first rank to the last.
    """

    name: str
    size: int
    span: int
    in_node: Sequence[int]
    elsewhere: Sequence[int]


@frozen
class _Rows:
    """Rows of the experts of a layer: of a static budget or not, in groups that may be filled up.

    ``held``: as many as the tensor has. ``sizes``: of the groups, filled up. ``counts``: of valid rows in each.
    """

    held: int
    sizes: tuple[int, ...]
    counts: tuple[int, ...]

    def valid(self, rows: int) -> int:
        """Valid rows of a product of so many: of all groups, or of one. Groups of one size count their mean."""
        if rows in (self.held, sum(self.sizes)):
            return sum(self.counts)
        of_groups = [count for size, count in zip(self.sizes, self.counts, strict=True) if size == rows]
        return round(sum(of_groups) / len(of_groups)) if of_groups else rows


@define
class _Kernel:
    """Operators that run in the place of one kernel, so far. ``read``, ``written``: bytes of storages from outside."""

    launch: Launch
    done: _Done
    read: dict[Life, int] = Factory(dict)
    written: dict[Life, int] = Factory(dict)
    made: set[Life] = Factory(set)
    matrices: set[Life] = Factory(set)
    """Storages from outside of all but numbers that they read."""

    def reads(self, life: Life, nbytes: int) -> None:
        """Note so many bytes of a storage that are read, if it is from outside."""
        if life not in self.made:
            self.read[life] = max(nbytes, self.read.get(life, 0))

    def writes(self, life: Life, nbytes: int) -> None:
        """Note so many bytes of a storage that are written, if it is from outside."""
        if life not in self.made:
            self.written[life] = max(nbytes, self.written.get(life, 0))


@frozen
class _NotedInKernel:
    """What operators do in the place of a kernel, as :class:`_Kernel` has it, of storages by their numbers.

    Those that the operators are given come first, then those that they allocate.
    """

    read: Mapping[int, int]
    written: Mapping[int, int]
    made: frozenset[int]
    matrices: frozenset[int]


@final
class Operations:
    """Notes the operators of a model by layer, region and pass, in forward and backward, while it is entered.

    A product in backward is a weight gradient if neither operand is a weight and the result has the shape of one.
    """

    def __init__(self, recorder: Recorder, layout: Layout) -> None:
        self.recorder = recorder
        self.layout = layout
        self._weights: set[frozenset[int]] = set()
        """The two sizes of each matrix among the weights, in either order: a gradient may come transposed."""
        self._done: dict[tuple[Place, str], _Done] = {}
        self._groups: dict[tuple[int, ...], _Group] = {}
        """What is known of groups by their ranks, of which there may be thousands."""
        self._kernel: _Kernel | None = None
        """The kernel in whose place operators ran last."""
        self._of_weights: set[Life] = set()
        """Storages that such operators made of weights alone, or that stand for codes of weights."""
        self._codes: dict[Life, torch.dtype] = {}
        """The dtype of the codes for which a storage stands."""
        self._products_of_codes: set[Life] = set()
        """Results of products of such storages. A GPU writes them in the dtype to which they are cast here."""
        self._rows: dict[int, _Rows] = {}
        """Rows of the experts of each layer."""
        self._regions_of_experts = {_EXPERTS}
        recorder.places.entered = self._entered

    def learn_weights(self, model: nn.Module) -> None:
        """Remember the shapes of the model's weights."""
        self._weights = {frozenset(parameter.shape[-2:]) for parameter in model.parameters() if parameter.dim() > 1}

    def __enter__(self) -> Operations:
        """Begin to note."""
        self.recorder.listeners.append(self._ran)
        return self

    def __exit__(self, *error: object) -> None:
        """Stop noting."""
        self.recorder.listeners.remove(self._ran)

    @property
    def _is_noting(self) -> bool:
        return self._ran in self.recorder.listeners

    def _ran(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note an operator that has run."""
        if func.is_view or func.namespace == "prim":
            return
        self._end_other_kernel()
        codes = account().stands_for
        now = launch()
        if codes is not None:
            self._note_form(codes, self.recorder.of(tensors_in(result)))
        elif now is not None:
            self._note_in_kernel(self._kernel_of(now), func, args, kwargs, result)
        else:
            self._note(func, args, kwargs, result)

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note an operator that runs for itself."""
        operator = func.overloadpacket
        if operator in _FIRST_FACTOR:
            first = _FIRST_FACTOR[operator]
            self._multiplied(operator, args[first], args[first + 1], result)
        elif operator is torch.ops.moefw.add_wgrad:
            main, grad_RO, x_RI = args[:3]
            shape = grad_RO.shape[-1], x_RI.shape[-1], self._valid(len(x_RI))
            self._product(operator, self._dtype(grad_RO), shape, groups=prod(main.shape[:-2]), during="wgrad")
        elif operator is _ATTENTION:
            core = _core(args[:3], is_causal=_argument(func, args, kwargs, "is_causal"))
            # Scores are a product over the width of keys; the result is one over as many values.
            self._attended(operator, args[0], core, core.key_width + core.value_width, during="fprop")
        elif operator is _ATTENTION_BACKWARD:
            core = _core(args[1:4], is_causal=_argument(func, args, kwargs, "is_causal"))
            # Gradients of queries and of keys, of values and of probabilities; and the scores of forward once more.
            self._attended(operator, args[1], core, 2 * (core.key_width + core.value_width), during="dgrad")
            self._attended(operator, args[1], core, core.key_width, during=AGAIN)
        elif func.namespace in ("c10d", "_c10d_functional"):
            if func is not WAIT:
                self._launched(func, args, kwargs)
        elif operator is aten._to_copy and not self._products_of_codes.isdisjoint(self.recorder.of(args[:1])):
            pass  # the product writes it
        elif operator not in _UNWRITTEN:
            self._read_and_written(func, args, kwargs, result)

    def _read_and_written(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note an operator that is no product and no transfer: on the GPU, on its host, or a copy between them."""
        is_off_device = self.recorder.is_off_device
        if not any(map(is_off_device, tensors_in((args, kwargs, result)))):
            self.moved(_moved(func, args, kwargs, result))
            return
        on_host = OnHost(nbytes=_moved(func, args, kwargs, result))
        if func.overloadpacket in _COPIES:
            *_, source = tensors_in(args)
            if not is_off_device(source):
                on_host = OnHost(copies=1, out=_nbytes(source))
            elif not is_off_device(result):
                on_host = OnHost(copies=1, back=_nbytes(source))
        done = self._done_here()
        done.on_host = done.on_host.plus(on_host)

    def circumstances(self) -> Hashable | None:
        """What decides how operators are noted here; None: each for itself."""
        if not self._is_noting:
            return "not noted"
        if account().stands_for is not None:
            return "another form of codes"
        return None if launch() is None else "in a kernel"

    def noted_apart(self, run: Callable[[], T], outside: Sequence[Life]) -> tuple[T, Any]:
        """Result of a function whose operators are noted as usual, and what was noted; None: it is not known.

        ``outside``: the storages that it is given. It runs where there are circumstances.
        """
        now = launch()
        if not self._is_noting or account().stands_for is not None or now is None:
            return run(), ()
        self._end_other_kernel()
        whole = self._kernel_of(now)
        self._kernel = apart = _Kernel(now, whole.done)
        before = len(self.recorder.lives)
        result = run()
        self._kernel = whole
        self._note_part(whole, apart.read, apart.written, apart.made, apart.matrices)
        storages = [*outside, *self.recorder.lives[before:]]
        if not apart.read.keys() | apart.written.keys() <= {*storages}:
            return result, None
        return result, _NotedInKernel(
            read={storages.index(life): nbytes for life, nbytes in apart.read.items()},
            written={storages.index(life): nbytes for life, nbytes in apart.written.items()},
            made=frozenset(map(storages.index, apart.made)),
            matrices=frozenset(map(storages.index, apart.matrices)),
        )

    def note_again(self, noted: Any, outside: Sequence[Life], made: Sequence[Life]) -> None:
        """Note what :meth:`noted_apart` did, of other storages. ``made``: those that the function allocates."""
        if not self._is_noting:
            return
        self._end_other_kernel()
        codes = account().stands_for
        now = launch()
        if codes is not None:
            self._note_form(codes, made)
        elif now is not None:
            storages = [*outside, *made]
            self._note_part(
                self._kernel_of(now),
                {storages[number]: nbytes for number, nbytes in noted.read.items()},
                {storages[number]: nbytes for number, nbytes in noted.written.items()},
                [storages[number] for number in noted.made],
                [storages[number] for number in noted.matrices],
            )

    def _note_form(self, codes: Codes, made: Iterable[Life]) -> None:
        """Note storages of a tensor that is another form of codes."""
        of_weights = self._is_of_weights(codes.tensor)
        for life in made:
            self._codes[life] = codes.dtype
            if of_weights:
                self._of_weights.add(life)

    def _kernel_of(self, now: Launch) -> _Kernel:
        """Kernel of a launch, in whose place operators run now."""
        if self._kernel is None:
            self._kernel = _Kernel(now, self._done_here())
        return self._kernel

    def _end_other_kernel(self) -> None:
        """Count the kernel in whose place operators ran last, if they no longer do."""
        if self._kernel is not None and self._kernel.launch is not launch():
            self._end_kernel(self._kernel)

    def _note_in_kernel(self, kernel: _Kernel, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note an operator that runs in the place of a kernel."""
        for tensor in tensors_in((args, kwargs)):
            for life in self.recorder.of([tensor]):
                kernel.reads(life, _nbytes(tensor))
                if tensor.dim() and life not in kernel.made:  # constants are scalars
                    kernel.matrices.add(life)
        for tensor in _changed(func, args, kwargs):
            for life in self.recorder.of([tensor]):
                kernel.writes(life, _nbytes(tensor))
        kernel.made.update(life for life in self.recorder.of(tensors_in(result)) if life not in kernel.read)

    def _note_part(
        self,
        kernel: _Kernel,
        read: Mapping[Life, int],
        written: Mapping[Life, int],
        made: Collection[Life],
        matrices: Collection[Life],
    ) -> None:
        """Note what some of the operators in the place of a kernel did."""
        for life, nbytes in read.items():
            kernel.reads(life, nbytes)
        for life, nbytes in written.items():
            kernel.writes(life, nbytes)
        kernel.matrices.update(life for life in matrices if life not in kernel.made)
        kernel.made.update(made)

    def _end_kernel(self, kernel: _Kernel) -> None:
        """Count the operators that ran in the place of a kernel as one."""
        self._kernel = None
        left = [life for life in kernel.made if life.alive(self.recorder.now)]
        if kernel.read and all(map(self._life_is_of_weights, kernel.matrices)):
            self._of_weights.update(left)
        kernel.done.operators += 1
        kernel.done.nbytes += sum(kernel.read.values()) + sum(kernel.written.values())
        kernel.done.nbytes += sum(life.nbytes for life in left)

    def _entered(self, place: Place, around: Sequence[Place], args: tuple[Any, ...]) -> None:
        """Learn the rows of a layer's experts, and which regions are inside of them."""
        if any(outer.region == _EXPERTS for outer in around):
            self._regions_of_experts.add(place.region)
        if place.region != _EXPERTS or place.layer is None or not args or not isinstance(args[0], ExpertBatch):
            return
        batch = args[0]
        if isinstance(batch.counts_e, FakeTensor) or isinstance(batch.offsets_e, FakeTensor):
            return  # they depend on values, and here there are none
        with _disable_current_modes():
            ends = batch.offsets_e.tolist()
            counts = tuple(batch.counts_e.tolist())
        sizes = tuple(end - begin for begin, end in zip([0, *ends], ends, strict=False))
        self._rows[place.layer] = _Rows(len(batch.rows_RD), sizes, counts)

    def _valid(self, rows: int) -> int:
        """Valid rows of a product here of so many rows."""
        place = self.recorder.places.here
        if place.layer not in self._rows or place.region not in self._regions_of_experts:
            return rows
        return self._rows[place.layer].valid(rows)

    def moved(self, nbytes: int) -> None:
        """Note one operator that reads and writes so many bytes."""
        done = self._done_here()
        done.operators += 1
        done.nbytes += nbytes

    def updates(self, updated: Updated) -> None:
        """Note what the operators of an update changed."""
        done = self._done_here()
        done.updated = done.updated.plus(updated)

    @contextmanager
    def grown(self, times: float) -> Iterator[None]:
        """Note the operators of this block with so many times the bytes that they read, write and copy."""
        before = {key: (done.nbytes, done.on_host) for key, done in self._done.items()}
        with self:
            yield
        for key, done in self._done.items():
            nbytes, on_host = before.get(key, (0, OnHost()))
            done.nbytes = nbytes + round(times * (done.nbytes - nbytes))
            done.on_host = on_host.plus(done.on_host.plus(on_host, -1), times)

    @contextmanager
    def unnoted(self) -> Iterator[None]:
        """Count nothing of what runs in this block."""
        counted, self._done = self._done, {}
        try:
            yield
        finally:
            self._done = counted

    def _done_here(self) -> _Done:
        """Record of the running place and phase."""
        places = self.recorder.places
        if account().done_for_step:
            phase = "once"
        elif places.runs_again:
            phase = "recompute"
        else:
            phase = places.here.phase
        here = places.here, phase
        if here not in self._done:
            self._done[here] = _Done()
        return self._done[here]

    def _multiplied(self, operator: Any, a: Tensor, b: Tensor, result: Tensor) -> None:
        """Note a product of matrices, ``a`` (..., m, k) with ``b`` (..., k, n), or of groups of them.

        Of a grouped product, one of the three has a dimension of groups and the others have their rows end to end.
        """
        batch = prod(a.shape[:-2])
        groups = max(batch, prod(b.shape[:-2]), prod(result.shape[:-2]))
        of_weights = self._is_of_weights(a) or self._is_of_weights(b)
        if not self.recorder.places.in_backward:
            during = "fprop"
        elif not of_weights and frozenset(result.shape[-2:]) in self._weights:
            during = "wgrad"
        else:
            during = "dgrad"
        rows = batch * a.shape[-2]
        summed = a.shape[-1]
        if during == "wgrad":
            summed = self._valid(summed)
        else:
            rows = self._valid(rows)
        if any(life in self._codes for life in self.recorder.of([a])):
            self._products_of_codes.update(self.recorder.of([result]))
        if account().done_again:
            during = AGAIN
        self._product(operator, self._dtype(a), (rows, b.shape[-1], summed), groups=groups, during=during)

    def _is_of_weights(self, tensor: Tensor) -> bool:
        """Whether a tensor was computed from weights alone, or stands for codes that were."""
        return any(map(self._life_is_of_weights, self.recorder.of([tensor])))

    def _life_is_of_weights(self, life: Life) -> bool:
        return life.is_copy_of_weights or life in self._of_weights

    def _dtype(self, operand: Tensor) -> torch.dtype:
        """Dtype of an operand, or of the codes that it stands for."""
        return next((self._codes[life] for life in self.recorder.of([operand]) if life in self._codes), operand.dtype)

    def _attended(self, operator: Any, query: Tensor, core: Core, width: int, *, during: str) -> None:
        """Note products of an attention core that together sum over ``width``."""
        shape = core.queries, core.keys, width
        self._product(operator, query.dtype, shape, groups=core.heads, during=during, scores=core.num_seen)

    def _product(
        self,
        operator: Any,
        dtype: torch.dtype,
        shape: tuple[int, int, int],
        *,
        groups: int,
        during: str,
        scores: int | None = None,
    ) -> None:
        product = Product(
            operator=str(operator).removeprefix("aten."),
            dtype=str(dtype).removeprefix("torch."),
            shape=shape,
            groups=groups,
            during=during,
            scores=scores,
        )
        self._done_here().products[product] += 1

    def _launched(self, func: Any, args: Any, kwargs: Any) -> None:
        with _disable_current_modes():  # reading it clones and splits tensors: not the model's work
            collective = collective_of(func, *tree_map_only(FakeTensor, _on_meta, (args, kwargs)))
        sent = {peer: sum(tensor.nbytes for tensor in tensors) for peer, tensors in collective.to.items()}
        self.sent(collective.kind, dist.get_process_group_ranks(collective.group), sent)

    def sent(self, kind: str, ranks: Sequence[int], nbytes: Mapping[int, int]) -> None:
        """Note one collective over ``ranks``. ``nbytes``: what this rank sends to each, by position in ``ranks``."""
        group = self._group(ranks)
        node_bytes = sum(nbytes.get(peer, 0) for peer in group.in_node)
        network_bytes = sum(nbytes.get(peer, 0) for peer in group.elsewhere)
        self._transferred(kind, group, node_bytes, network_bytes)

    def sent_to_all(self, kind: str, ranks: Sequence[int], nbytes: int) -> None:
        """Note one collective over ``ranks`` in which this rank sends as much to each."""
        group = self._group(ranks)
        self._transferred(kind, group, len(group.in_node) * nbytes, len(group.elsewhere) * nbytes)

    def _transferred(self, kind: str, group: _Group, node_bytes: int, network_bytes: int) -> None:
        """Note one collective of a group, in which this rank sends so much inside its node and to other nodes."""
        transfer = Transfer(
            kind=kind,
            group=group.name,
            ranks=group.size,
            node=node_bytes,
            network=network_bytes,
            span=group.span,
        )
        self._done_here().transfers[transfer] += 1

    def _group(self, ranks: Sequence[int]) -> _Group:
        key = tuple(ranks)
        if key not in self._groups:
            per_node = self.layout.ranks_per_node
            own = self.layout.rank
            peers = [peer for peer, rank in enumerate(key) if rank != own]
            self._groups[key] = _Group(
                name=self._name(key),
                size=len(key),
                span=max(key) - min(key),
                in_node=[peer for peer in peers if key[peer] // per_node == own // per_node],
                elsewhere=[peer for peer in peers if key[peer] // per_node != own // per_node],
            )
        return self._groups[key]

    def _name(self, ranks: tuple[int, ...]) -> str:
        """Axes whose group these ranks are; where there are none, the number of ranks."""
        plan = self.layout.plan
        single_axes = [(axis,) for axis in plan.sizes]
        combined_axes = [("ep", "etp"), *COPIES.values(), STAGE]
        for candidates in (single_axes, combined_axes):
            names = [" x ".join(axes) for axes in candidates if plan.group(self.layout.rank, axes) == ranks]
            if names:
                return " or ".join(names)
        return f"{len(ranks)} ranks"

    def work(self, layers: Mapping[int | None, int]) -> Iterator[Work]:
        """Yield what was done in each place. ``layers``: the number of layers that each layer stands for."""
        if self._kernel is not None:
            self._end_kernel(self._kernel)
        for (place, phase), done in self._done.items():
            yield Work(
                layer=place.layer,
                layers=layers.get(place.layer, 1),
                region=place.region,
                phase=phase,
                products=tuple(evolve(product, times=times) for product, times in done.products.items()),
                transfers=tuple(evolve(transfer, times=times) for transfer, times in done.transfers.items()),
                operators=done.operators,
                nbytes=done.nbytes,
                on_host=done.on_host,
                updated=done.updated,
            )


def _moved(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Bytes that an operator reads and writes. A tensor that changes in place is both."""
    if func.name() == _INTO_THE_GATHERED:
        return 2 * sum(map(_nbytes, args[0]))
    written = [*tensors_in(result)]
    if "out" in kwargs or func.overloadpacket is aten._foreach_copy_:
        written = []  # it is among the arguments, and not read
    elif not written:
        written = [*_changed(func, args, kwargs)]  # an operator on lists in place returns nothing
    nbytes = sum(map(_nbytes, tensors_in((args, kwargs, written))))
    if func.overloadpacket in _LOOKUPS:
        return nbytes - _nbytes(args[0]) + _nbytes(result)
    return nbytes


def _on_meta(tensor: FakeTensor) -> Tensor:
    """Tensor of the same sizes, which PyTorch splits among many ranks much faster."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _core(operands: Sequence[Tensor], *, is_causal: bool) -> Core:
    """Attention core whose kernel an operator is. ``operands``: queries, keys and values.

    Of the mask of an operator that was called by itself only whether it is causal is known.
    """
    attended = account().core
    if attended is not None:
        return attended()
    query, key, value = operands
    batch, heads, queries, width = query.shape
    keys = key.shape[2]
    num_seen = queries * (queries + 1) // 2 if is_causal else queries * keys
    return Core(
        queries=batch * heads * queries,
        keys=keys,
        heads=batch * heads,
        key_width=width,
        value_width=value.shape[-1],
        num_seen=batch * heads * num_seen,
    )


def _argument(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    """Value of an argument of an operator, or its default."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.name == name:
            return value
    default = next(argument.default_value for argument in func._schema.arguments if argument.name == name)
    return kwargs.get(name, default)


def _changed(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Yield the tensors that an operator changes in place."""
    for index, argument in enumerate(func._schema.arguments):
        is_changed = argument.alias_info is not None and argument.alias_info.is_write
        # Fused optimizers change gradients only where they undo the scale of a loss.
        if is_changed and argument.name != "grads":
            yield from tensors_in(args[index] if index < len(args) else kwargs.get(argument.name))


def _nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor. An expanded one has no more than its storage."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())
