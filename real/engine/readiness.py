"""Readiness: when a bucket's gradients are final, learnt from as few hooks as will do.

The first step has a hook on every parameter, which tells the order in which gradients come. From
then on one hook a bucket, on the gradient that came last in it, asks whether all of the bucket's
gradients are there: a gradient that was absent when the backward began is final once it is there.
What does not go as it did, a gradient that was kept from before or one that comes later than the
bucket's last, is not guessed at: that step's buckets wait for the backward's end, and from the
next step on every parameter has its hook again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch.utils.hooks import RemovableHandle

from fleetbench.plan.combination import Combination


def all_gradients(parameters: Sequence[torch.nn.Parameter]) -> bool:
    """Whether all have a gradient; asked in every step, so in the cheapest way."""
    return all([parameter.grad is not None for parameter in parameters])  # noqa: C419  # a generator takes twice as long


def any_gradient(parameters: Sequence[torch.nn.Parameter]) -> bool:
    """Whether one of them has a gradient."""
    return any([parameter.grad is not None for parameter in parameters])  # noqa: C419  # as above


def is_dropped(what: Combination, gradients_of: Sequence[torch.nn.Parameter]) -> bool:
    """Whether the gradients of a backward are thrown away, and its step never was: cleared, or no numbers, which a GradScaler leaves out.

    Only where a second backward could take their place.
    """
    if not what.leaves_averages:
        return False
    return is_cleared(gradients_of) or not all(values.isfinite().all() for values in _values(gradients_of))


def is_cleared(gradients_of: Sequence[torch.nn.Parameter]) -> bool:
    """Whether there is no gradient, or nothing but zeros."""
    return not any(values.any() for values in _values(gradients_of))


def _values(gradients_of: Sequence[torch.nn.Parameter]) -> Iterator[torch.Tensor]:
    gradients = (parameter.grad for parameter in gradients_of if parameter.grad is not None)
    return (gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients)


class Readiness:
    """Tells which bucket of a step is ready, in the buckets' order.

    ``observing`` (a hook a parameter) -> ``watching`` (a hook a bucket) -> ``observing``, for good,
    after the first surprise. Call ``begin`` as a backward begins, and ``finish`` as it ends.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], on_gradient: Callable[[str | None], None]) -> None:
        """``on_gradient`` hears that a gradient is there: its name while every parameter is observed."""
        self._parameters = parameters
        self._on_gradient = on_gradient
        self._handles: list[RemovableHandle] = []
        self._members = list(parameters.values())
        self._buckets: list[list[torch.nn.Parameter]] = []
        self._surprised = False
        self._stale = False
        self._kept: list[tuple[torch.Tensor | None, int]] = []
        self._triggered: set[int] = set()
        self.observes = True
        """Whether every parameter has its hook."""
        self._observe_all()

    def watch(self, buckets: Sequence[Sequence[str]], order: Sequence[str]) -> None:
        """Watch these buckets, whose gradients came in ``order``; no buckets: nothing is asked before the backward's end."""
        position = {name: index for index, name in enumerate(order)}
        self._buckets = [[self._parameters[name] for name in names] for names in buckets]
        self._remove()
        self.observes = False
        for index, names in enumerate(buckets):
            last = self._parameters[max(names, key=position.__getitem__)]
            self._handles.append(last.register_post_accumulate_grad_hook(self._on_last(index)))

    def observe(self) -> None:
        """Give every parameter its hook, for good."""
        if not self.observes:
            self._remove()
            self._observe_all()

    def begin(self) -> None:
        """A backward begins."""
        self._triggered.clear()
        self._stale = not self.observes and any_gradient(self._members)
        self._surprised |= self._stale and bool(self._buckets)
        self._kept = self._marks() if self._stale else []

    @property
    def has_come(self) -> bool:
        """While watching: whether the backward has left a gradient; one that lay there before was written to, or replaced."""
        if self._triggered:
            return True
        if not self._stale:
            return any_gradient(self._members)
        return any(now[0] is not kept[0] or now[1] != kept[1] for now, kept in zip(self._marks(), self._kept, strict=True))

    def _marks(self) -> list[tuple[torch.Tensor | None, int]]:
        """Every gradient with its version, which counts what autograd adds to it in place."""
        return [(gradient, -1 if gradient is None else gradient._version) for gradient in (item.grad for item in self._members)]  # noqa: SLF001  # torch documents it, and has no other name for it

    def is_ready(self, bucket: int) -> bool:
        """While watching: whether a bucket's gradients are all final."""
        if self._stale or bucket not in self._triggered:
            return False
        if all_gradients(self._buckets[bucket]):
            return True
        self._surprised = True
        return False

    def finish(self) -> None:
        """The backward is over."""
        if self._surprised and not self.observes:
            self.observe()

    def close(self) -> None:
        """Remove the hooks."""
        self._remove()

    def _on_last(self, bucket: int) -> Callable[[torch.Tensor], None]:
        def hook(_parameter: torch.Tensor) -> None:
            self._triggered.add(bucket)
            self._on_gradient(None)

        return hook

    def _observe_all(self) -> None:
        self.observes = True
        for name, parameter in self._parameters.items():
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._on_each(name)))

    def _on_each(self, name: str) -> Callable[[torch.Tensor], None]:
        return lambda _parameter: self._on_gradient(name)

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
