"""Outputs of a stage that share memory, and how they go along so that they share it again where they come in.

    stage 0 returns            h, h[:, 2:6], h.detach()
    what goes along            h, and of the two others how they lie in it
    stage 1 is called with     h', h'[:, 2:6], h'.detach(), made again of the one tensor that came

So a change in place of one is seen in the others, and gradients flow through it, as if the stages were one. What goes
along is the tensor that autograd has as the base of the views, or what of its memory the outputs use. Back come the
gradients of that tensor and, apart from it, those of each view as it was before any change in place: so they are
added up just as in a plain loop. There a view is made again, of what its memory has become, when it is first used
after a change; so where a change came before the stage, its views are made again there as well.

Some memory must not be changed by a later stage, as no order of ops would make that right: a parameter or buffer of
an earlier stage, which its next microbatch reads; what goes to several stages; tensors of which autograd does not
know that they share memory. Such tensors are watched, see `ReadOnlyInputs`.

The skeleton of such a payload is `["shared", skeleton, refs, views, kept]`: of each value of the inner skeleton the
leaf that it is (0, 1, ...) or the view (-1, -2, ...); of each view what it is made from and how; of kept leaves why.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.tensors.pytree import DTYPES, Skeleton, shifted

SHARED, GRADED, RENEWED = "shared", "graded", "renewed"
WHOLE = -1
"""Where a view begins that is all of the leaf it is made from, however that lies."""
_MOST_OF_BASE = 4
"""How many times larger than the outputs a base may be that goes along whole."""


class StridedLayout(NamedTuple):
    """How a tensor lies in its storage; bytes from the storage's start, elements otherwise."""

    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @classmethod
    def of(cls, tensor: Tensor) -> StridedLayout:
        size = tensor.element_size()
        return cls(int(tensor.storage_offset()) * size, tuple(tensor.shape), tensor.stride(), size)

    @property
    def end(self) -> int:
        """The first byte after it."""
        last = sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        return self.start + (last + 1) * self.itemsize

    @property
    def is_dense(self) -> bool:
        """Whether it has all the bytes between its first and its last."""
        num = 1
        for n, stride in zip(self.shape, self.strides, strict=True):
            num *= n if stride else 1
        return num * self.itemsize == self.end - self.start


View = list[Any]
"""What it is made from, how, bytes from the root's start, shape, strides, type, whether it is conjugate.

How is "graded": a view with a gradient, which goes back; "renewed": one whose memory was changed in place since it
was last used, so that autograd makes it again of what its base has become when it is used next, and its gradient
goes there; "view": one without; "detached": one that gets none from what it is made from, whatever happens."""


def share(
    values: list[Tensor], skeleton: Skeleton, state: Callable[[], Collection[int]], stage: int, num_targets: int
) -> tuple[list[Tensor], Skeleton, list[Tensor]]:
    """What goes along of the outputs `values` of a stage: tensors, how outputs are made of them, and those of both
    whose gradients come back (`graded`).

    Args:
        skeleton: how they were arranged.
        state: addresses of the memory of the stage's parameters and buffers.
        num_targets: how many stages they go to.
    """
    if len(values) == num_targets == 1 and not (values[0].is_leaf or values[0]._is_view()):
        return values, skeleton, values  # most stages
    groups = _groups(values) if len(values) > 1 else []
    alone = _alone(values, groups) if num_targets == 1 else ()
    if not groups and not alone:
        kept = _kept(values, state, stage, num_targets, {})
        along = [SHARED, skeleton, list(range(len(values))), [], kept] if kept else skeleton
        return values, along, [value for value in values if value.requires_grad]
    refs: dict[int, int] = {}
    views: list[View] = []
    leaves: list[Tensor] = []
    strange: dict[int, str] = {}
    first = {group[0]: group for group in groups}
    for place, value in enumerate(values):
        if place in first:
            root = _link({each: values[each] for each in first[place]}, len(leaves), refs, views)
            if root is not None:
                leaves.append(root)
                continue
            for each in first[place]:
                strange[each] = f"memory that outputs of stage {stage} share in a way that autograd does not know of"
        if place in alone:
            refs[place] = -len(views) - 1
            views.append([len(leaves), GRADED, WHOLE, (), (), "", False])
            leaves.append(base_of(value).as_strided(value.shape, value.stride(), value.storage_offset()))
        elif place not in refs:
            refs[place] = len(leaves)
            leaves.append(value)
    reasons = {refs[place]: reason for place, reason in strange.items()}
    kept = _kept(leaves, state, stage, num_targets, reasons)
    along = [SHARED, skeleton, [refs[place] for place in range(len(values))], views, kept]
    by_ref = {ref: values[place] for place, ref in refs.items()}
    made = [by_ref.get(-1 - number, leaves[0]) for number in range(len(views))]
    return leaves, along, graded(leaves, [leaf.requires_grad for leaf in leaves], along, made)


def is_shared(skeleton: Skeleton) -> bool:
    return type(skeleton) is list and skeleton[0] == SHARED


def has_views(skeleton: Skeleton) -> bool:
    """Whether some values share memory."""
    return is_shared(skeleton) and bool(skeleton[3])


def inner(skeleton: Skeleton) -> Skeleton:
    """How values are arranged."""
    return skeleton[1] if is_shared(skeleton) else skeleton


def kept_of(skeleton: Skeleton) -> list[tuple[int, str]]:
    """The leaves that must stay as they are, and why."""
    return [(place, reason) for place, reason in skeleton[4]] if is_shared(skeleton) else []


def views_of(leaves: Sequence[Tensor], skeleton: Skeleton) -> list[Tensor]:
    """The views that a payload says how to make, made of the leaves that came."""
    made: list[Tensor] = []
    for parent, how, start, shape, strides, dtype, conj in skeleton[3] if is_shared(skeleton) else ():
        of, root = made[-1 - parent] if parent < 0 else leaves[parent], leaves[_leaf_of(parent, skeleton)]
        if start == WHOLE:
            made.append(of.view_as(of))
            continue
        made.append(_view(of.detach() if how == "detached" else of, root, start, shape, strides, DTYPES[dtype], conj))
    return made


def values_of(leaves: list[Tensor], views: Sequence[Tensor], skeleton: Skeleton) -> list[Tensor]:
    """The values that are arranged by `inner(skeleton)`."""
    if not is_shared(skeleton):
        return leaves
    return [leaves[ref] if ref >= 0 else views[-1 - ref] for ref in skeleton[2]]


def graded(
    leaves: Sequence[Any], needs_grad: Sequence[bool], skeleton: Skeleton, views: Sequence[Any] = ()
) -> list[Any]:
    """Of leaves and views those whose gradients go back, in that order: each leaf, then the views of it."""
    if not has_views(skeleton):
        return [leaf for leaf, needed in zip(leaves, needs_grad, strict=True) if needed]
    found: list[Any] = []
    for place, leaf in enumerate(leaves):
        found += [leaf] if needs_grad[place] else []
        found += [
            view
            for view, (parent, how, *_) in zip(views, skeleton[3], strict=True)
            if (parent, how) == (place, GRADED)
        ]
    return found


def renewed(skeleton: Skeleton) -> list[int]:
    """The leaves some of whose views autograd is to make again when they are used next."""
    return sorted({parent for parent, how, *_ in skeleton[3] if how == RENEWED}) if is_shared(skeleton) else []


def num_graded(needs_grad: Sequence[bool], skeleton: Skeleton) -> int:
    """How many gradients go back."""
    return sum(needs_grad) + (sum(how == GRADED for _, how, *_ in skeleton[3]) if is_shared(skeleton) else 0)


def _leaf_of(ref: int, skeleton: Skeleton) -> int:
    while ref < 0:
        ref = skeleton[3][-1 - ref][0]
    return ref


def side_by_side(skeletons: Sequence[Skeleton], sizes: Sequence[int]) -> Skeleton:
    """One skeleton for a tuple of payloads; `sizes`: how many leaves each has."""
    insides: list[Skeleton] = []
    refs: list[int] = []
    views: list[Any] = []
    kept: list[Any] = []
    first = 0
    for skeleton, size in zip(skeletons, sizes, strict=True):
        whole = skeleton if is_shared(skeleton) else [SHARED, skeleton, list(range(size)), [], []]

        def moved(ref: int, leaf: int = first, view: int = len(views)) -> int:
            return ref + leaf if ref >= 0 else ref - view

        insides.append(shifted(whole[1], len(refs)))
        refs += [moved(ref) for ref in whole[2]]
        views += [[moved(parent), *how] for parent, *how in whole[3]]
        kept += [[place + first, reason] for place, reason in whole[4]]
        first += size
    together = ["tuple", insides]
    if not views and not kept:
        return together
    return [SHARED, together, refs, views, kept]


class ReadOnlyInputs:
    """Tensors that a stage was given and that must stay as they are.

    Args:
        kept: which of the leaves, and why.
    """

    def __init__(self, leaves: Sequence[Tensor], kept: Sequence[tuple[int, str]]) -> None:
        self._seen = [(leaves[place], leaves[place]._version, why) for place, why in kept]

    def require_same(self, stage: int) -> None:
        """Raises RuntimeFailure where the stage changed one."""
        for tensor, version, why in self._seen:
            if tensor._version != version:
                raise RuntimeFailure(
                    f"stage {stage} changed one of its inputs in place, of shape {tuple(tensor.shape)}: {why}. Let "
                    "it change a copy (clone())"
                )


def storage_of(tensor: Tensor) -> int:
    """The address of a tensor's memory; 0 where there is none, or it is not the tensor's own (subclasses)."""
    if type(tensor) not in _OWN_MEMORY or tensor.layout is not torch.strided:
        return 0
    return tensor.untyped_storage().data_ptr()


_OWN_MEMORY = (Tensor, Parameter)
_ANCHOR = torch.zeros((), requires_grad=True, device="cpu")
"""What nodes are made of that are there to be numbered alone."""


def _kept(
    leaves: Sequence[Tensor],
    state: Callable[[], Collection[int]],
    stage: int,
    num_targets: int,
    strange: dict[int, str],
) -> list[Any]:
    if num_targets > 1:
        why = (
            f"memory that goes from stage {stage} to {num_targets} stages, and what each finds there would depend on "
        )
        return [[place, why + "which runs first"] for place in range(len(leaves))]
    found: list[Any] = []
    for place, leaf in enumerate(leaves):
        if place in strange:
            found.append([place, strange[place]])
        elif base_of(leaf).is_leaf and storage_of(leaf) in state():
            found.append(
                [
                    place,
                    f"the memory of a parameter or buffer of stage {stage}, which runs its next microbatch with it",
                ]
            )
    return found


def _groups(values: Sequence[Tensor]) -> list[list[int]]:
    """The places of values that overlap in memory or, with a gradient, are views of one base and fill most of what
    lies between them, group by group; those of one alone are left out.

    Autograd takes a change of one view for a change of its base, and so of all views of it.
    """
    by_storage: dict[int, list[int]] = {}
    for place, value in enumerate(values):
        if address := storage_of(value):
            by_storage.setdefault(address, []).append(place)
    found: list[list[int]] = []
    for places in by_storage.values():
        if len(places) > 1:
            groups: list[list[int]] = []
            for place in places:
                touched = [g for g in groups if any(_belong(values[place], values[p]) for p in g)]
                groups = [g for g in groups if g not in touched]
                groups.append(sorted([p for g in touched for p in g] + [place]))
            found += [group for group in groups if len(group) > 1]
    return found


def _belong(a: Tensor, b: Tensor) -> bool:
    if _overlap(one := StridedLayout.of(a), other := StridedLayout.of(b)):
        return True
    used = a.numel() * one.itemsize + b.numel() * other.itemsize
    return (
        a.requires_grad
        and b.requires_grad
        and base_of(a) is base_of(b)
        and max(one.end, other.end) - min(one.start, other.start) <= _MOST_OF_BASE * used
    )


def _alone(values: Sequence[Tensor], groups: Sequence[Sequence[int]]) -> frozenset[int]:
    """The places of views with a gradient that share no memory with another of the values.

    What of them goes along is that part of their base, so that the gradients of what a later stage makes of it in
    place come back apart from those of the view as it was.
    """
    shared = {place for group in groups for place in group}
    return frozenset(
        place
        for place, value in enumerate(values)
        if value.requires_grad
        and value._is_view()
        and place not in shared
        and value.numel()
        and storage_of(value)
        and storage_of(base_of(value))
        and value.dtype == base_of(value).dtype
        and base_of(value).requires_grad
        and 0 not in value.stride()
        and not (value.is_conj() or value.is_neg() or base_of(value).is_conj() or base_of(value).is_neg())
    )


def _overlap(a: StridedLayout, b: StridedLayout) -> bool:
    if 0 in a.shape or 0 in b.shape or a.end <= b.start or b.end <= a.start:
        return False
    if a.is_dense and b.is_dense:
        return True
    least = min(a.start, b.start)
    return _meet(a._replace(start=a.start - least), b._replace(start=b.start - least))


@lru_cache(maxsize=256)
def _meet(a: StridedLayout, b: StridedLayout) -> bool:
    """Whether two tensors have a byte in common; exact, for those with gaps."""
    memory = torch.zeros(max(a.end, b.end), dtype=torch.bool, device="cpu")
    _bytes_of(memory, a).fill_(True)
    return bool(_bytes_of(memory, b).any())


def _bytes_of(memory: Tensor, layout: StridedLayout) -> Tensor:
    once = [n if stride else 1 for n, stride in zip(layout.shape, layout.strides, strict=True)]
    strides = [stride * layout.itemsize for stride in layout.strides]
    return memory.as_strided((*once, layout.itemsize), (*strides, 1), layout.start)


def _link(members: dict[int, Tensor], leaf: int, refs: dict[int, int], views: list[View]) -> Tensor | None:
    """Notes how outputs that share memory are made of one tensor, which is returned: an output, or their base.

    Args:
        members: outputs by their place.
        leaf: the number that the tensor will have.

    Returns None, and notes nothing, where they cannot be made of one.
    """
    graded_ones = [place for place, t in members.items() if t.requires_grad]
    bases = {id(base_of(members[place])): base_of(members[place]) for place in graded_ones or members}
    if len(bases) > 1 and graded_ones:
        return None  # several graphs write to one memory
    base = next(iter(bases.values()))
    family = [p for p, t in members.items() if base_of(t) is base and t.requires_grad == bool(graded_ones)]
    root = _root(base, members, family)
    if root is None or not all(_fits(t, root) for t in members.values()):
        return None
    start = StridedLayout.of(root).start

    def note(parent: int, how: str, tensor: Tensor) -> int:
        layout, dtype = StridedLayout.of(tensor), str(tensor.dtype).removeprefix("torch.")
        views.append([parent, how, layout.start - start, layout.shape, layout.strides, dtype, tensor.is_conj()])
        return -len(views)

    refs.update({place: leaf for place, t in members.items() if t is root})
    for place in family:
        if place not in refs:
            view = members[place]
            refs[place] = note(leaf, ("view" if not graded_ones else RENEWED if _is_behind(view) else GRADED), view)
    without: dict[int, int] = {}
    """Of each base of outputs without gradient what they are made of: what one gets in place the others get."""
    for place, tensor in members.items():
        if place not in refs:
            key = id(base_of(tensor))
            if key not in without:
                without[key] = note(leaf, "detached", root)
            refs[place] = note(without[key], "view", tensor)
    return root


def _is_behind(view: Tensor) -> bool:
    """Whether what a view is of was changed in place since the view was last used.

    Autograd makes its node again when it is asked for, and that node then has a later number than one made just
    before.
    """
    if not view._is_view() or not view._version:
        return False
    before = (_ANCHOR * 1).grad_fn
    assert before is not None
    assert view.grad_fn is not None
    return bool(view.grad_fn._sequence_nr() > before._sequence_nr())


def _root(base: Tensor, members: dict[int, Tensor], family: list[int]) -> Tensor | None:
    """What members are made of: their base where all lie in it, else what they use of its memory; or None."""
    layouts = [StridedLayout.of(t) for t in members.values()]
    start, end = min(layout.start for layout in layouts), max(layout.end for layout in layouts)
    if not storage_of(base) or base.is_conj() or base.is_neg():
        return None
    layout, itself = StridedLayout.of(base), any(base is t for t in members.values())
    if base.requires_grad != members[family[0]].requires_grad:
        return None
    within = layout.start <= start and end <= layout.end and (layout.is_dense or len(family) == len(members))
    if within and (itself or layout.end - layout.start <= _MOST_OF_BASE * (end - start)):
        return base
    if (start - layout.start) % layout.itemsize or (end - start) % layout.itemsize:
        return None
    return base.as_strided(((end - start) // layout.itemsize,), (1,), start // layout.itemsize)


def _fits(tensor: Tensor, root: Tensor) -> bool:
    """Whether a tensor can be made of the root: they are of one type, or one's numbers are parts of the other's."""
    if tensor is root:
        return True
    if tensor.is_neg() or (tensor.is_conj() and not root.is_complex()):
        return False
    start, layout = StridedLayout.of(root).start, StridedLayout.of(tensor)
    if tensor.dtype == root.dtype or not tensor.requires_grad:
        return (layout.start - start) % layout.itemsize == 0
    is_complex = torch.empty(0, dtype=tensor.dtype, device="cpu").is_complex()
    return is_complex != root.is_complex() and layout.start % layout.itemsize == 0


def _view(of: Tensor, root: Tensor, start: int, shape: Any, strides: Any, dtype: torch.dtype, conj: bool) -> Tensor:
    """A view of a tensor: of the given type, `start` bytes after where the root begins."""
    first = root.storage_offset() * root.element_size() + start
    if dtype == of.dtype:
        pass
    elif dtype.is_complex and not of.dtype.is_complex and dtype.to_real() == of.dtype:
        offset, num = of.storage_offset(), _length(of)
        skip = (first // of.element_size() - offset) % 2
        of = torch.view_as_complex(of.as_strided(((num - skip) // 2, 2), (2, 1), offset + skip))
    elif of.dtype.is_complex and of.dtype.to_real() == dtype:
        of = torch.view_as_real(of)
    else:
        of = of.as_strided((_length(of),), (1,), of.storage_offset()).view(dtype)
    once = [n if stride else 1 for n, stride in zip(shape, strides, strict=True)]
    view = of.as_strided(once, strides, first // dtype.itemsize)
    if once != list(shape):
        view = view.expand(shape)  # whose gradient is added up as the stage before would have done
    return view.conj() if conj else view


def _length(tensor: Tensor) -> int:
    """Elements from a tensor's first to its last, gaps included."""
    layout = StridedLayout.of(tensor)
    return (layout.end - layout.start) // layout.itemsize


def base_of(tensor: Tensor) -> Tensor:
    """What autograd takes a tensor for a view of; itself where it is none."""
    return tensor if tensor._base is None else tensor._base
