"""Optimizer operations: kernels that update several variables at once, decomposed into their arithmetic.

A segment writes variables at its end, so it cannot contain such a kernel; the formulas are those of TensorFlow's CPU
kernels, operation by operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tracer.nodedef import Symbol

# By operation, how many of its first inputs are variables. The others are scalars and the gradient, which comes last or
# before the momentum.
VARIABLES = {
    "ResourceApplyAdadelta": 3, "ResourceApplyAdagradV2": 2, "ResourceApplyAdam": 3, "ResourceApplyCenteredRMSProp": 4,
    "ResourceApplyGradientDescent": 1, "ResourceApplyKerasMomentum": 2, "ResourceApplyMomentum": 2,
    "ResourceApplyRMSProp": 3,
}  # fmt: skip


class _Number:
    """A symbol with operators; `emit` adds an operation on symbols, and infers its shape."""

    def __init__(self, symbol: Symbol, emit: Callable[[str, list[Symbol]], Symbol]) -> None:
        self.symbol, self._emit = symbol, emit

    def _with(self, op: str, *others: _Number) -> _Number:
        return _Number(self._emit(op, [self.symbol, *(other.symbol for other in others)]), self._emit)

    def __add__(self, other: _Number) -> _Number:
        return self._with("AddV2", other)

    def __sub__(self, other: _Number) -> _Number:
        return self._with("Sub", other)

    def __mul__(self, other: _Number) -> _Number:
        return self._with("Mul", other)

    def __truediv__(self, other: _Number) -> _Number:
        return self._with("RealDiv", other)

    def square(self) -> _Number:
        return self._with("Square")

    def sqrt(self) -> _Number:
        return self._with("Sqrt")

    def rsqrt(self) -> _Number:
        return self._with("Rsqrt")


def updated(
    op: str,
    attrs: dict[str, Any],
    variables: list[Symbol],
    given: list[Symbol],
    one: Symbol,
    emit: Callable[[str, list[Symbol]], Symbol],
) -> list[Symbol]:
    """Returns the new values of `variables`; `given` are the operation's other inputs, `one` is the constant 1."""
    numbers = [_Number(symbol, emit) for symbol in (*variables, *given)]
    unit = _Number(one, emit)
    return [number.symbol for number in _FORMULAS[op](attrs, unit, *numbers)]


def _gradient_descent(attrs: dict[str, Any], one: _Number, var: _Number, rate: _Number, grad: _Number) -> list[_Number]:
    return [var - grad * rate]


def _momentum(
    attrs: dict[str, Any], one: _Number, var: _Number, accum: _Number, rate: _Number, grad: _Number, momentum: _Number
) -> list[_Number]:
    accum = accum * momentum + grad
    if attrs.get("use_nesterov"):
        return [var - (grad * rate + accum * momentum * rate), accum]
    return [var - accum * rate, accum]


def _keras_momentum(
    attrs: dict[str, Any], one: _Number, var: _Number, accum: _Number, rate: _Number, grad: _Number, momentum: _Number
) -> list[_Number]:
    accum = accum * momentum - grad * rate
    return [var + (accum * momentum - grad * rate if attrs.get("use_nesterov") else accum), accum]


def _adam(
    attrs: dict[str, Any], one: _Number, var: _Number, m: _Number, v: _Number, power_1: _Number, power_2: _Number,
    rate: _Number, beta_1: _Number, beta_2: _Number, epsilon: _Number, grad: _Number,
) -> list[_Number]:  # fmt: skip
    alpha = rate * (one - power_2).sqrt() / (one - power_1)
    m = m + (grad - m) * (one - beta_1)
    v = v + (grad.square() - v) * (one - beta_2)
    step = grad * (one - beta_1) + beta_1 * m if attrs.get("use_nesterov") else m
    return [var - step * alpha / (v.sqrt() + epsilon), m, v]


def _adagrad(
    attrs: dict[str, Any], one: _Number, var: _Number, accum: _Number, rate: _Number, epsilon: _Number, grad: _Number
) -> list[_Number]:
    if attrs.get("update_slots", True):
        accum = accum + grad.square()
    return [var - grad * rate / (accum.sqrt() + epsilon), accum]


def _rms_prop(
    attrs: dict[str, Any], one: _Number, var: _Number, ms: _Number, mom: _Number, rate: _Number, rho: _Number,
    momentum: _Number, epsilon: _Number, grad: _Number,
) -> list[_Number]:  # fmt: skip
    ms = ms + (grad.square() - ms) * (one - rho)
    mom = mom * momentum + grad * rate / (ms + epsilon).sqrt()
    return [var - mom, ms, mom]


def _centered_rms_prop(
    attrs: dict[str, Any], one: _Number, var: _Number, mg: _Number, ms: _Number, mom: _Number, rate: _Number,
    rho: _Number, momentum: _Number, epsilon: _Number, grad: _Number,
) -> list[_Number]:  # fmt: skip
    ms = ms + (grad.square() - ms) * (one - rho)
    mg = mg + (grad - mg) * (one - rho)
    mom = mom * momentum + grad * rate / (ms - mg.square() + epsilon).sqrt()
    return [var - mom, mg, ms, mom]


def _adadelta(
    attrs: dict[str, Any], one: _Number, var: _Number, accum: _Number, accum_update: _Number, rate: _Number,
    rho: _Number, epsilon: _Number, grad: _Number,
) -> list[_Number]:  # fmt: skip
    accum = accum * rho + grad.square() * (one - rho)
    update = (accum_update + epsilon).sqrt() * (accum + epsilon).rsqrt() * grad
    return [var - update * rate, accum, accum_update * rho + update.square() * (one - rho)]


_FORMULAS: dict[str, Callable[..., list[_Number]]] = {
    "ResourceApplyAdadelta": _adadelta,
    "ResourceApplyAdagradV2": _adagrad,
    "ResourceApplyAdam": _adam,
    "ResourceApplyCenteredRMSProp": _centered_rms_prop,
    "ResourceApplyGradientDescent": _gradient_descent,
    "ResourceApplyKerasMomentum": _keras_momentum,
    "ResourceApplyMomentum": _momentum,
    "ResourceApplyRMSProp": _rms_prop,
}
