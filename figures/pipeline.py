"""From a figure's settings to its pictures: frames are computed once, kept with their origin, and drawn as often as wanted.

A frame is kept as ``NAME.PRESET.parquet`` beside a ``NAME.PRESET.json`` that holds the settings, their hash and where the
numbers come from. It is read as long as the hash is that of the present settings; it is computed anew otherwise, or when
asked. Only the ``cpu`` preset writes into this package's ``data`` and ``gallery``; the others write beside their runs.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from figures._style import GALLERY, save_figure
from figures.registry import FigureError, FigureModule, get_figure
from probes.errors import Interrupted, KeelError, OutputError
from probes.stored_json import COUNT, NUMBER, TABLE, TEXT, list_of, read_object

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "DATA",
    "RUNS",
    "Drawn",
    "Preset",
    "StoredFrame",
    "figure_frame",
    "make_figure",
    "read_preset",
    "run_main",
    "settings_key",
    "stored_frame",
]

DATA = Path(__file__).with_name("data")
RUNS = Path("runs", "figures")
"""Where runs that can be resumed live unless another folder is named; relative to the working folder."""
_FORMATS = ("png", "svg")
_ORIGIN = {
    "figure": TEXT,
    "preset": TEXT,
    "settings": TABLE,
    "key": TEXT,
    "rows": COUNT,
    "columns": list_of(TEXT, least=1),
    "seconds": NUMBER,
    "time": TEXT,
    "parquet_sha256": TEXT,
}
"""Fields of the JSON beside a frame that are read."""
_FIRST_SCHEMA = 1
_INTERRUPTED = 128 + 2


class Preset(str, Enum):
    """How much is computed."""

    SMOKE = "smoke"
    """Seconds: that everything runs."""
    CPU = "cpu"
    """Minutes to hours on two cores: what the gallery shows."""
    GPU = "gpu"
    """Sized for one large GPU."""


def read_preset(text: str) -> Preset:
    """The preset of this name.

    Raises:
        FigureError: if there is none.

    Example:
        >>> read_preset("smoke").value
        'smoke'
    """
    try:
        return Preset(text)
    except ValueError as error:
        raise FigureError(f"there is no preset '{text}'; presets: {', '.join(preset.value for preset in Preset)}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFrame:
    """A frame as it was kept.

    Attributes:
        frame: tidy rows.
        about: the JSON beside it: settings, key, versions, device, threads, time, seconds of computing, commit.
        computed: whether it was computed by this call.
    """

    frame: pd.DataFrame
    about: Mapping[str, Any]
    computed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """What :func:`make_figure` did.

    Attributes:
        name: of the figure.
        preset: its size.
        computed: whether the frame was computed, not read.
        seconds: of computing the frame, now or when it was kept.
        paths: the pictures.
    """

    name: str
    preset: Preset
    computed: bool
    seconds: float
    paths: tuple[Path, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "name": self.name,
            "preset": self.preset.value,
            "computed": self.computed,
            "seconds": self.seconds,
            "paths": [str(path) for path in self.paths],
        }


def settings_key(name: str, module: FigureModule, preset: Preset) -> str:
    """Hash of all that a frame depends on: settings, version of its columns, and the files it is made from.

    A module may count its ``SCHEMA_VERSION`` up when the meaning of its frame changes, and name files in ``INPUTS``.

    Args:
        name: of the figure.
        module: of the figure.
        preset: whose settings.

    Returns:
        64 hexadecimal digits.
    """
    inputs: Iterable[Path] = getattr(module, "INPUTS", ())
    content = {
        "figure": name,
        "schema": getattr(module, "SCHEMA_VERSION", _FIRST_SCHEMA),
        "settings": dict(_settings(name, module, preset)),
        "inputs": {path.name: _digest(path.read_bytes()) for path in inputs},
    }
    return _digest(json.dumps(content, sort_keys=True, allow_nan=False).encode())


def _settings(name: str, module: FigureModule, preset: Preset) -> Mapping[str, Any]:
    if preset.value not in module.SETTINGS:
        raise FigureError(f"figure '{name}' has no preset '{preset.value}'; it has {', '.join(module.SETTINGS)}")
    return module.SETTINGS[preset.value]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def figure_frame(
    name: str,
    preset: Preset | str = Preset.CPU,
    *,
    runs: Path = RUNS,
    output: Path | None = None,
    recompute: bool = False,
    tell: Callable[[str], object] | None = None,
) -> pd.DataFrame:
    """The frame of a figure, read where it is kept and computed otherwise.

    Args:
        name: of the figure.
        preset: how much is computed.
        runs: folder of the runs that can be resumed; what is finished there is not run again.
        output: what is computed is kept in its ``data``; None for the preset's own place.
        recompute: compute although a frame of these settings is kept, and replace it.
        tell: told what happens, one line at a time.

    Returns:
        What the figure's ``compute`` gives with the preset's settings.

    Raises:
        FigureError: if there is no such figure or preset.
        OutputError: if the frame cannot be kept.
    """
    return _obtain(name, _preset(preset), runs, output, recompute, tell or _silent).frame


def make_figure(
    name: str,
    preset: Preset | str = Preset.CPU,
    *,
    runs: Path = RUNS,
    output: Path | None = None,
    recompute: bool = False,
    tell: Callable[[str], object] | None = None,
) -> Drawn:
    """Draw a figure, as PNG and SVG.

    Args:
        name: of the figure.
        preset: how much is computed.
        runs: folder of the runs that can be resumed; what is finished there is not run again.
        output: folder of the pictures and, in its ``data``, of frames computed now. None: this package's ``gallery`` and
            ``data`` for ``cpu``, a folder of the preset's name in ``runs`` for the others.
        recompute: compute although a frame of these settings is kept, and replace it.
        tell: told what happens, one line at a time.

    Returns:
        The paths of the pictures, and whether the frame was computed.

    Raises:
        FigureError: if there is no such figure or preset.
        OutputError: if something cannot be written.
    """
    preset = _preset(preset)
    stored = _obtain(name, preset, runs, output, recompute, tell or _silent)
    figure = get_figure(name).load().draw(stored.frame)
    folder = _place(preset, runs, output, GALLERY, "gallery") if output is None else output
    _make_folder(folder)
    paths = tuple(folder / f"{name}.{suffix}" for suffix in _FORMATS)
    try:
        save_figure(figure, *paths)
    except OSError as error:
        place = error.filename or folder
        raise OutputError(f"cannot write '{place}': {error.strerror or error}; name a folder with -o") from error
    return Drawn(
        name=name,
        preset=preset,
        computed=stored.computed,
        seconds=float(stored.about["seconds"]),
        paths=paths,
    )


def _preset(preset: Preset | str) -> Preset:
    return read_preset(preset.value if isinstance(preset, Preset) else preset)


def _silent(line: str) -> None:
    pass


def _place(preset: Preset, runs: Path, output: Path | None, package: Path, name: str) -> Path:
    """Where this preset writes: the named folder, this package for the cpu preset, or beside the runs."""
    if output is not None:
        return output / name
    return package if preset is Preset.CPU else runs / preset.value / name


def _obtain(
    name: str, preset: Preset, runs: Path, output: Path | None, recompute: bool, tell: Callable[[str], object]
) -> StoredFrame:
    module = get_figure(name).load()
    key = settings_key(name, module, preset)
    folder = _place(preset, runs, output, DATA, "data")
    if not recompute:
        for place in dict.fromkeys((folder, DATA)):
            try:
                kept = _read_kept(name, preset, place)
                if kept.about["key"] != key:
                    raise FigureError(f"the frame kept in {place} is of other settings")
            except FileNotFoundError:
                continue
            except FigureError as error:
                tell(f"{name}: {error}")
                continue
            tell(f"{name}: frame of {kept.about['time']}, {len(kept.frame):,} rows")
            return kept
    _make_folder(folder)  # before hours of computing, not after
    tell(f"{name}: computing ({preset.value})")
    stored = _compute(name, module, preset, key, runs / preset.value / name)
    _keep(stored, name, preset, folder)
    tell(f"{name}: computed in {stored.about['seconds']:.1f} s, {len(stored.frame):,} rows")
    return stored


def _compute(name: str, module: FigureModule, preset: Preset, key: str, folder: Path) -> StoredFrame:
    from probes.provenance import provenance

    settings = _settings(name, module, preset)
    start = time.perf_counter()
    frame = module.compute(folder=folder, **settings)
    seconds = time.perf_counter() - start
    details, frame.attrs = dict(frame.attrs), {}
    about = {
        "figure": name,
        "preset": preset.value,
        "settings": dict(settings),
        "schema": getattr(module, "SCHEMA_VERSION", _FIRST_SCHEMA),
        "key": key,
        "rows": len(frame),
        "columns": list(map(str, frame.columns)),
        "seconds": round(seconds, 3),
        "device": _device_name(str(settings.get("device", "cpu"))),
        **provenance(),
        **({"details": details} if details else {}),
    }
    return StoredFrame(frame=frame, about=about, computed=True)


def _device_name(device: str) -> str:
    if not device.startswith("cuda"):
        return device
    import torch

    return f"{device} ({torch.cuda.get_device_name(device)})"


def _keep(stored: StoredFrame, name: str, preset: Preset, folder: Path) -> None:
    """The frame, then the JSON that names its bytes: a kill between the two leaves a pair that does not count."""
    from probes.run_folder import RunFolder

    buffer = io.BytesIO()
    stored.frame.to_parquet(buffer, index=False)
    content = buffer.getvalue()
    files = RunFolder(folder)
    files.write_bytes(f"{name}.{preset.value}.parquet", content)
    files.write_json(f"{name}.{preset.value}.json", {**stored.about, "parquet_sha256": _digest(content)})


def stored_frame(name: str, preset: Preset | str = Preset.CPU, *, folder: Path = DATA) -> StoredFrame | None:
    """The frame as it is kept, whatever the present settings are.

    Args:
        name: of the figure.
        preset: whose frame.
        folder: where frames are kept.

    Returns:
        The frame with its origin; None if there is none, or if it does not count: its two files are damaged, of another
        figure, or do not belong together.
    """
    try:
        return _read_kept(name, _preset(preset), folder)
    except (FileNotFoundError, FigureError):
        return None


def _read_kept(name: str, preset: Preset, folder: Path) -> StoredFrame:
    """The frame as it is kept.

    Raises:
        FileNotFoundError: if there is none.
        FigureError: if it does not count, saying why.
    """
    import pandas as pd
    from pyarrow import ArrowException

    stem = f"{name}.{preset.value}"
    origin, data = folder / f"{stem}.json", folder / f"{stem}.parquet"
    about = read_object(origin, _ORIGIN, error=FigureError)
    if (about["figure"], about["preset"]) != (name, preset.value):
        raise FigureError(f"{origin} is of {about['figure']}, preset {about['preset']}")
    try:
        content = data.read_bytes()
    except OSError as error:
        raise FigureError(f"cannot read {data}: {error.strerror or error}") from error
    if about["parquet_sha256"] != _digest(content):
        raise FigureError(f"the bytes of {data} are not those that {origin.name} names")
    try:
        frame = pd.read_parquet(io.BytesIO(content))
    except (ArrowException, OSError, ValueError) as error:
        raise FigureError(f"{data} is no Parquet file: {error}") from error
    if (len(frame), list(frame.columns)) != (about["rows"], about["columns"]):
        raise FigureError(f"{data} does not have the {about['rows']} rows or the columns that {origin.name} names")
    return StoredFrame(frame=frame, about=about)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot make the folder '{folder}': {error.strerror or error}; name another with -o") from error


def run_main(name: str, arguments: Sequence[str] | None = None) -> None:
    """The command of one figure's module: ``python -m figures.NAME``; paths on stdout, progress on stderr.

    Args:
        name: of the figure.
        arguments: of the command line; this process's own if None.

    Raises:
        SystemExit: with 2 after an error of the user's, with 130 where Ctrl-C or a signal has stopped it.
    """
    entry = get_figure(name)
    parser = argparse.ArgumentParser(prog=f"python -m {entry.module}", description=entry.title)
    parser.add_argument("--preset", default=Preset.CPU.value, choices=[preset.value for preset in Preset])
    parser.add_argument("--runs", type=Path, default=RUNS, help="folder of the runs that can be resumed")
    parser.add_argument("-o", "--output", type=Path, default=None, help="folder of the pictures")
    parser.add_argument("--recompute", action="store_true", help="compute although a frame is kept")
    options = parser.parse_args(arguments)
    try:
        drawn = make_figure(
            name,
            options.preset,
            runs=options.runs,
            output=options.output,
            recompute=options.recompute,
            tell=lambda line: print(line, file=sys.stderr),
        )
    except KeelError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    except (Interrupted, KeyboardInterrupt) as error:
        print(f"{parser.prog}: {str(error) or 'stopped'}", file=sys.stderr)
        raise SystemExit(_INTERRUPTED) from error
    print(*drawn.paths, sep="\n")
