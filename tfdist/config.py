"""The settings of a run: typed, with their documentation, checked once. Flags and YAML files derive from these."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import typing
from typing import Any, Literal

from tfdist.errors import UsageError, closest
from tfdist.strategies.table import BACKENDS, Options, check_backend, check_options

__all__ = ["Settings", "learning_rate", "save_interval", "within"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How a task is trained. Keyword arguments of `tfdist.Trainer`, and flags of `tfdist train`."""

    backend: str | None = None
    """horovod, multi_worker_mirrored, parameter_server, mirrored, central_storage or one_device. Unset: horovod under
    mpirun, multi_worker_mirrored under srun or TF_CONFIG; alone, mirrored with several GPUs, else one_device."""
    replicas: int | None = None
    """Devices of each process (logical CPU devices where there is no GPU), on mirrored, central_storage and
    multi_worker_mirrored."""
    epochs: int | None = None
    """Passes over the training split. Unset: what the task says."""
    steps: int | None = None
    """Training steps in all, instead of epochs."""
    global_batch_size: int | None = None
    """Examples over all replicas that are worked on at a time, whatever the number of replicas; one step, or a part
    of one (see accumulate). Unset: what the task says."""
    accumulate: int = 1
    """Global batches in one step. Their gradients add up, and one update sees them all."""
    seed: int = 0
    """Seed of the initial weights, of the order of the examples, of dropout and of augmentation."""
    shuffle_buffer: int = 100_000
    """Examples that shuffling mixes at a time; 0 keeps the dataset's order."""

    parameter_servers: int | None = None
    """Processes that hold the variables, on parameter_server. Unset: 1."""
    max_in_flight: int | None = None
    """Steps that may be under way at a time, on parameter_server. Unset: 4 for each worker."""
    sync_every: int | None = None
    """On horovod: train each replica by itself, and average weights and optimizer state after every so many steps of an
    epoch, and at its end. Unset: reduce the gradients of every step."""
    collectives: Literal["auto", "ring", "nccl"] = "auto"
    """How multi_worker_mirrored reduces: as TensorFlow chooses, by its own ring, or by NCCL between GPUs."""
    gpu_memory: Literal["grow", "all"] = "grow"
    """Let TensorFlow take a GPU's memory as it needs it, or all of it at once."""

    learning_rate: float | None = None
    """Base learning rate. Unset: what the task says."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Factor on the learning rate: 1, the number of replicas, or its square root."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls from the end of the warm-up, towards 0 after the run's last step."""
    warmup_steps: int | None = None
    """Steps over which the factor of lr_scaling is reached."""
    warmup_epochs: int | None = None
    """The same in epochs."""
    warmup_from_zero: bool = False
    """Warm up from 0 instead of from the base learning rate."""

    loss_reduction: Literal["weighted_mean", "sum_over_batch"] = "weighted_mean"
    """What the sum of weight·loss is divided by: the sum of the weights, or the number of losses."""
    clip_value: float | None = None
    """Clip each element of the reduced gradient to ± this value."""
    clip_norm: float | None = None
    """Clip the reduced gradient of each variable to this norm."""
    clip_global_norm: float | None = None
    """Clip the reduced gradients together to this norm."""
    weight_decay: float | None = None
    """Subtract learning rate · this · weight at each update, in place of the optimizer's own. Unset: what that is."""
    weight_decay_exclude: tuple[str, ...] = ()
    """Leave weights out of the decay whose path holds one of these words, such as bias or gamma."""
    ema: float | None = None
    """Momentum of an exponential moving average of the weights, which evaluation then uses."""
    nan_policy: Literal["stop", "skip", "ignore"] = "stop"
    """What to do in a step whose loss or gradient is not finite: stop on all ranks, leave the step out, or apply."""

    precision: Literal["float32", "float16", "bfloat16"] = "float32"
    """Type in which layers compute (variables stay float32); float16 scales the loss dynamically."""
    loss_scale: float = 32768.0
    """First loss scale of float16; an overflow anywhere skips the step and halves it."""
    loss_scale_growth: int = 2000
    """Steps without overflow after which the loss scale doubles."""
    jit: bool = False
    """Compile each replica's part of the step with XLA; what goes over the network stays outside."""
    batch_norm: Literal["model", "local", "sync"] = "model"
    """Statistics of BatchNormalization: as the model says, of each replica's rows, or of all replicas' rows."""
    sparse: Literal["dense", "gather"] = "dense"
    """Gradients of embeddings: made dense and summed, or their rows gathered from all replicas."""
    compression: Literal["none", "float16", "bfloat16"] = "none"
    """Type in which gradients travel between replicas."""
    reduction: Literal["sum", "adasum"] = "sum"
    """How gradients of replicas are combined; adasum on horovod only."""

    validate_every: int = 1
    """Evaluate after every so many epochs, and always at the end; 0: only at the end."""
    monitor: str | None = None
    """What patience, plateau_patience and restore_best look at, as split/metric. Unset: the loss of the first
    evaluated split."""
    monitor_mode: Literal["auto", "min", "max"] = "auto"
    """Whether less or more of it is better; auto knows losses, errors, accuracies and the like by their name."""
    min_delta: float = 0.0
    """What counts as better must be better by more than this."""
    patience: int | None = None
    """Stop after so many evaluations in a row that were not better."""
    plateau_patience: int | None = None
    """Multiply the learning rate by plateau_factor after so many evaluations in a row that were not better."""
    plateau_factor: float = 0.1
    """See plateau_patience."""
    restore_best: bool = False
    """End with the weights of the best evaluation."""

    checkpoint_dir: str | None = None
    """Save checkpoints in this folder, and go on from the newest one there (see resume)."""
    save_every: str | None = None
    """How often to save: a number of steps, as 100, or a time, as 30s, 10m or 1h. Unset: at the end of each epoch. The
    end of the run is always saved."""
    keep: int = 3
    """Newest checkpoints to keep; older ones are deleted."""
    keep_best: str | None = None
    """Also keep the checkpoint whose evaluation was the best, as split/metric."""
    resume: str = "auto"
    """auto: go on from the newest checkpoint of checkpoint_dir, if there is one; never: begin anew, in a folder without
    checkpoints; or the path of a checkpoint."""
    init_from: str | None = None
    """Begin with the weights of this .keras file or checkpoint, and with nothing else of it."""
    stop_after_steps: int | None = None
    """Save, report and end after so many steps of this start; the next start goes on."""
    check_every: int = 1000
    """Compare checksums of the weights over all replicas after every so many steps; 0: only at the end."""
    stall_timeout: float = 600.0
    """End the job where a process makes no step for so many seconds, and say where it was; 0: never."""

    reproducible: bool = False
    """Train to the same bits on every synchronous backend and at every number of replicas that divides virtual_shards.
    Slower; operations are deterministic, and each runs in one thread, if intra_op_threads does not say otherwise."""
    virtual_shards: int = 8
    """With reproducible: pieces of a global batch that are computed each by itself, a multiple of the number of
    replicas. Runs agree whose virtual_shards are equal."""

    trace: str | None = None
    """Write checksums of each step's rows, gradients and variables to this file, which tfdist compare reads."""
    quiet: bool = False
    """Print nothing but errors."""
    steps_per_chunk: int = 10
    """Steps between two moments at which the trainer logs, evaluates and reacts."""
    intra_op_threads: int | None = None
    """Threads of one TensorFlow operation. Unset: usable cores // replicas on this host, at least 1."""

    @classmethod
    def of(cls, **settings: Any) -> Settings:
        """Settings from keyword arguments. Raises UsageError for an unknown name, with the nearest one."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in settings:
            if name not in known:
                raise UsageError(f"{name}={settings[name]!r} is not a setting.{closest(name, known)}")
        return cls(**{n: os.fspath(v) if isinstance(v, os.PathLike) else v for n, v in settings.items()})

    def __post_init__(self) -> None:
        kinds = typing.get_type_hints(Settings)
        for field in dataclasses.fields(Settings):
            _of_kind(field.name, getattr(self, field.name), kinds[field.name])
        check_backend(self.backend)
        for name, (least, most) in _LIMITS.items():
            within(name, getattr(self, name), least, most)
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UsageError(f"{name}={value!r} must be a finite number above 0.")
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value < high:
                raise UsageError(f"{name}={value!r} must be at least {low} and below {high}.")
        if self.learning_rate is not None:
            learning_rate(self.learning_rate)
        save_interval(self.save_every)
        for name in ("checkpoint_dir", "resume", "init_from", "trace"):
            if getattr(self, name) == "":
                raise UsageError(f"{name}='' is no path. Give one, or leave it out; the current folder is '.'.")
        if 0 < self.stall_timeout < 2:
            raise UsageError(f"stall_timeout={self.stall_timeout!r} must be 2 seconds or more, or 0 for never.")
        self._no_contradictions()

    def _no_contradictions(self) -> None:
        """Refuse settings that do not go together, with the reason."""
        for names, reason in _EXCLUSIVE:
            given = [f"{name}={getattr(self, name)!r}" for name in names if getattr(self, name) is not None]
            if len(given) > 1:
                raise UsageError(f"{' and '.join(given)} are both set, but {reason}. Leave one of them out.")
        watches = (self.monitor, self.patience, self.plateau_patience, self.restore_best or None)
        scaled = self.precision == "float16"
        partners = {
            "weight_decay_exclude": (self.weight_decay is not None, "weight_decay"),
            "warmup_from_zero": (self._warms_up, "warmup_steps or warmup_epochs"),
            "loss_scale": (scaled, "precision='float16'"),
            "loss_scale_growth": (scaled, "precision='float16'"),
            "plateau_factor": (self.plateau_patience is not None, "plateau_patience"),
            "virtual_shards": (self.reproducible, "reproducible"),
            "min_delta": (any(watches), "patience, plateau_patience or restore_best"),
            "monitor_mode": (any(watches) or self.keep_best, "patience, plateau_patience, restore_best or keep_best"),
        }
        saves = (self.checkpoint_dir is not None, "checkpoint_dir")
        partners |= dict.fromkeys(("save_every", "keep", "keep_best", "stop_after_steps"), saves)
        for name, (has_partner, partner) in partners.items():
            if getattr(self, name) != getattr(Settings, name) and not has_partner:
                raise UsageError(f"{name}={getattr(self, name)!r} has no effect without {partner}. Set that, too.")
        for name in ("patience", "plateau_patience", "restore_best"):
            if getattr(self, name) and self.validate_every == 0:
                raise UsageError(
                    f"{name}={getattr(self, name)} compares evaluations, and validate_every=0 leaves one, at the end. "
                    "Set validate_every to 1 or more."
                )
        if self.backend is not None:
            check_options(self.backend, self.options)
            self.check_for(self.backend)
        if self.reduction == "adasum":
            self._without(
                "reduction='adasum'", ("compression", "sparse"), "Adasum needs whole gradients in full precision"
            )
        if self.sync_every is not None:
            self._without(
                f"sync_every={self.sync_every}",
                ("accumulate", "compression", "sparse", "reduction", "trace"),
                "no gradients go between the replicas",
            )
            if self.precision == "float16":
                raise UsageError(
                    f"sync_every={self.sync_every} and precision='float16' do not go together: an overflow must skip "
                    "the step on all replicas. Use precision='bfloat16', or leave sync_every out."
                )
            if self.batch_norm == "sync":
                raise UsageError(
                    f"sync_every={self.sync_every} and batch_norm='sync' do not go together: replicas train each by "
                    "itself. Use batch_norm='local', or leave sync_every out."
                )
        if self.reproducible:
            self._without(
                "reproducible=True",
                ("sync_every", "compression", "sparse", "reduction"),
                "what shards add up to is gathered whole and added in one order",
            )
            self._without("reproducible=True", ("lr_scaling",), "it makes the learning rate follow the replicas")
            if self.batch_norm == "sync":
                raise UsageError(
                    "reproducible=True and batch_norm='sync' do not go together: each virtual shard is normalized by "
                    "itself. Use batch_norm='local', or leave reproducible out."
                )
        if self.sparse == "gather" and self.accumulate > 1:
            raise UsageError(
                f"sparse='gather' and accumulate={self.accumulate} do not go together: gradients add up in dense "
                "form. Leave one of them out."
            )

    def _without(self, what: str, names: tuple[str, ...], reason: str) -> None:
        for name in names:
            if getattr(self, name) != getattr(Settings, name):
                raise UsageError(
                    f"{what} and {name}={getattr(self, name)!r} do not go together: {reason}. Leave one of them out."
                )

    def check_for(self, backend: str) -> None:
        """Raises UsageError where a setting does not go together with a backend."""
        kind = BACKENDS[backend]
        if self.reduction == "adasum" and not kind.adasum:
            raise UsageError(
                f"reduction='adasum' is Horovod's, and backend={backend!r} does not have it. Use backend='horovod' "
                "under mpirun, or leave it out."
            )
        if self.sync_every is not None and not kind.own_copies:
            raise UsageError(
                f"sync_every={self.sync_every} needs a copy of the weights on every replica that may differ from the "
                f"others', and backend={backend!r} has none. Use backend='horovod' under mpirun, or leave it out."
            )
        if self.max_in_flight is not None and not kind.asynchronous:
            raise UsageError(
                f"max_in_flight={self.max_in_flight} has no effect with backend={backend!r}. Leave it out, or use "
                "backend='parameter_server'."
            )
        if self.jit and kind.one_copy:
            raise UsageError(
                f"jit=True does not go together with backend={backend!r}: its variables are on another device than the "
                "replicas, where compiled code does not reach them. Leave jit out."
            )
        if kind.asynchronous:
            self._without(
                f"backend={backend!r}",
                ("accumulate", "compression", "reduction", "reproducible", "trace"),
                "a step is one worker's, and its gradients go straight to the parameter servers",
            )
            if self.precision == "float16":
                raise UsageError(
                    f"backend={backend!r} and precision='float16' do not go together: an overflow must change the loss "
                    "scale before the next step, and steps run side by side. Use precision='bfloat16'."
                )

    @property
    def chunk(self) -> int:
        """Steps of a chunk: `steps_per_chunk`, or the next multiple of `sync_every`."""
        every = self.sync_every or 1
        return -(-self.steps_per_chunk // every) * every

    @property
    def shards(self) -> int | None:
        """Virtual shards of a global batch, if there are any."""
        return self.virtual_shards if self.reproducible else None

    @property
    def options(self) -> Options:
        """What the backend is opened with."""
        return Options(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Options)})

    @property
    def _warms_up(self) -> bool:
        return self.warmup_steps is not None or self.warmup_epochs is not None


_LIMITS: dict[str, tuple[int, int]] = {
    "replicas": (1, 2**31 - 1),
    "epochs": (1, 2**63 - 1),
    "steps": (1, 2**63 - 1),
    "global_batch_size": (1, 2**31 - 1),
    "accumulate": (1, 2**31 - 1),
    "parameter_servers": (1, 2**15),
    "max_in_flight": (1, 2**20),
    "sync_every": (1, 2**31 - 1),
    "warmup_steps": (0, 2**31 - 1),
    "warmup_epochs": (0, 2**31 - 1),
    "loss_scale_growth": (1, 2**31 - 1),
    "patience": (1, 2**31 - 1),
    "plateau_patience": (1, 2**31 - 1),
    "steps_per_chunk": (1, 2**31 - 1),
    "intra_op_threads": (1, 1024),
    "seed": (0, 2**32 - 1),
    "shuffle_buffer": (0, 2**63 - 1),
    "validate_every": (0, 2**31 - 1),
    "keep": (1, 2**31 - 1),
    "stop_after_steps": (1, 2**63 - 1),
    "check_every": (0, 2**63 - 1),
    "virtual_shards": (1, 2**15),
}
_POSITIVE = ("clip_value", "clip_norm", "clip_global_norm", "loss_scale", "plateau_factor")
_RANGES: dict[str, tuple[float, float]] = {
    "weight_decay": (0.0, math.inf),
    "ema": (0.0, 1.0),
    "plateau_factor": (0.0, 1.0),
    "min_delta": (0.0, math.inf),
    "stall_timeout": (0.0, math.inf),
}
_EXCLUSIVE = [
    (("epochs", "steps"), "each says when to end"),
    (("clip_value", "clip_norm"), "gradients are clipped in one way"),
    (("clip_value", "clip_global_norm"), "gradients are clipped in one way"),
    (("clip_norm", "clip_global_norm"), "gradients are clipped in one way"),
    (("warmup_steps", "warmup_epochs"), "each says how long to warm up"),
]


def learning_rate(value: Any) -> float:
    """The learning rate, checked. Raises UsageError unless it is a finite number, 0 or more."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise UsageError(f"learning_rate={value!r} must be a finite number, 0 or more.")
    return float(value)


def save_interval(value: str | None) -> tuple[int | None, float | None]:
    """What `save_every` means: a number of steps, or of seconds. Raises UsageError where it is neither."""
    if value is None:
        return None, None
    match = re.fullmatch(r"([0-9]{1,15})([smh]?)", value)
    if match is None or int(match[1]) == 0:
        raise UsageError(
            f"save_every={value!r} must be a number of steps, as 100, or a time, as 30s, 10m or 1h; above 0."
        )
    number, unit = int(match[1]), match[2]
    return (None, number * {"s": 1.0, "m": 60.0, "h": 3600.0}[unit]) if unit else (number, None)


def _of_kind(name: str, value: Any, kind: Any) -> None:
    """Check a value against the type of its field; flags are checked before."""
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if value not in choices:
            near = closest(value, choices) if isinstance(value, str) else ""
            raise UsageError(f"{name}={value!r} must be one of {', '.join(choices)}.{near}")
        return
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, tuple | list) or not all(isinstance(item, str) for item in value):
            raise UsageError(f"{name}={value!r} must be a tuple of words.")
        return
    parts: tuple[Any, ...] = typing.get_args(kind) or (kind,)
    if value is None and type(None) in parts:
        return
    words = {bool: "True or False", int: "a whole number", float: "a number", str: "text"}[parts[0]]
    fits = isinstance(value, int | float if parts[0] is float else parts[0])
    if not fits or (isinstance(value, bool) and parts[0] is not bool):
        raise UsageError(f"{name}={value!r} must be {words}.")


def within(name: str, value: float | None, least: float, most: float) -> None:
    """Raises UsageError unless a number is unset, or between two others."""
    if value is None:
        return
    if not value >= least:
        raise UsageError(f"{name}={value} must be {least} or more.")
    if not value <= most:
        raise UsageError(f"{name}={value} must be {most} or less.")
