r"""The device that a user names, checked once and in one way: for measurements, trainings and placements alike."""

from __future__ import annotations

import torch

from probes.errors import KeelError

__all__ = ["DeviceError", "named_device", "resolve_device"]


class DeviceError(KeelError, ValueError):
    """A device that is none, or that this machine does not have. The message names it."""


def named_device(name: str | int | torch.device, *, error: type[KeelError] = DeviceError) -> torch.device:
    """The device of that name, whether or not this machine has it.

    Args:
        name: such as ``cpu``, ``cuda:1``; an integer counts the accelerators.
        error: raised if it is none; its own kind where a name belongs to something larger.

    Returns:
        The device.

    Raises:
        KeelError: as ``error`` says.
    """
    try:
        return torch.device(name)
    except (RuntimeError, TypeError, ValueError) as reason:
        raise error(_refusal(name, reason)) from reason


def resolve_device(name: str | int | torch.device, *, error: type[KeelError] = DeviceError) -> torch.device:
    """The device of that name, once numbers have gone there and come back.

    Args:
        name: as of :func:`named_device`.
        error: raised if it cannot be used.

    Returns:
        The device.

    Raises:
        KeelError: as ``error`` says, if there is no such device here, or it holds no numbers.

    Example:
        >>> resolve_device("cpu")
        device(type='cpu')
        >>> resolve_device("abacus")
        Traceback (most recent call last):
        probes.device.DeviceError: device 'abacus' cannot be used: Expected one of cpu, cuda, ...; 'cpu' always works
    """
    device = named_device(name, error=error)
    if device.type == "meta":
        raise error(_refusal(name, "it holds shapes and no numbers"))
    try:
        torch.ones(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as reason:
        raise error(_refusal(name, reason)) from reason
    return device


def _refusal(name: object, reason: object) -> str:
    return f"device '{name}' cannot be used: {str(reason).splitlines()[0]}; 'cpu' always works"
