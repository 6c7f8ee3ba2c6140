"""The configuration file: TOML, one table a part, every key with its unit in its name.

Unknown keys are errors, so that a misspelt one is not silently the default. `load` reads it,
`gemctl config check` prints what `load` says, and the daemon reads it again on SIGHUP or
`gemctl config reload`: what `restart_needed` names keeps its old value until a restart.
"""

from __future__ import annotations

import difflib
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from gemctl.errors import ApiError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_BYTES = 256 * 1024
FIXED = ("daemon", "metrics", "mqtt", "sensors", "worker")  # tables that need a restart
Celsius = Annotated[float, Field(ge=-40, le=150)]
Seconds = Annotated[float, Field(gt=0, le=86400)]
Mode = Literal["performance", "balanced", "aggressive", "conservative", "silent", "off"]


class Part(BaseModel):
    """A table of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class DaemonConfig(Part):
    """Places and permissions."""

    socket: Path = Path("/run/gemctl/gemctl.sock")
    state: Path = Path("/var/lib/gemctl")  # store and state.json
    read_group: str = "gemctl"  # root and the daemon's own user may always read and write
    write_group: str = "gemctl-admin"
    log_prompts: bool = False
    connections: Annotated[int, Field(ge=1, le=1024)] = 64


class WorkerConfig(Part):
    """One process of the engine for every loaded model."""

    program: str = "gemrun"
    threads: Annotated[int, Field(ge=0, le=8)] = 0  # 0: the engine decides
    prefill_batch_size: Annotated[int, Field(ge=0, le=4096)] = 64  # duty changes between steps
    start_timeout_s: Seconds = 60.0
    heartbeat_s: Seconds = 1.0
    hang_s: Seconds = 20.0  # no step, or no answer, for so long: the worker is killed
    crashes: Annotated[int, Field(ge=1, le=100)] = 3  # within crash_window_s: the slot is faulted
    crash_window_s: Seconds = 300.0
    backoff_s: Seconds = 0.2  # before the first restart; doubles up to backoff_most_s
    backoff_most_s: Seconds = 30.0


class ModelsConfig(Part):
    """Store, replacement and requests."""

    signature: Literal["required", "preferred", "off"] = "preferred"
    keys_dir: Path = Path("/etc/gemctl/keys.d")
    allow_foreign_board: bool = False
    keep: Annotated[int, Field(ge=1, le=16)] = 2  # good versions
    size_most_bytes: Annotated[int, Field(ge=1)] = 64 << 30
    memory_most_bytes: Annotated[int, Field(ge=0)] = 0  # for all models; 0: 65 % of the machine's
    prefault_mbps: Annotated[float, Field(gt=0)] = 800.0
    warmup_prompt: Annotated[str, Field(max_length=4096)] = "Hello"
    drain_s: Seconds = 30.0
    probation_s: Annotated[float, Field(ge=0, le=86400)] = 60.0
    probation_requests: Annotated[int, Field(ge=0, le=1000000)] = 20
    queue: Annotated[int, Field(ge=1, le=4096)] = 64  # waiting requests of a model
    request_timeout_s: Seconds = 120.0
    auto_reset_kv_cache: bool = False
    speculate: Annotated[int, Field(ge=0, le=6)] = 0


class ThrottleConfig(Part):
    """Policy of the throttle; the state file may hold newer values from the command line."""

    mode: Mode = "balanced"
    temp_c: Celsius | None = None  # threshold; absent: the artifact's or the board's
    hysteresis_c: Annotated[float, Field(ge=3, le=30)] = 5.0
    horizon_s: Annotated[float, Field(ge=1, le=300)] = 30.0
    ambient_c: Celsius | None = None
    rtheta_c_per_w: Annotated[float, Field(gt=0, le=100)] | None = None  # `calibrate thermal`
    tau_s: Annotated[float, Field(gt=0, le=3600)] | None = None
    allow_unload: bool = False  # may the last step free the memory


class SensorsConfig(Part):
    """Where temperature and power come from."""

    sysfs_root: Path = Path("/")  # put before /sys and /proc; another one in tests
    zones: tuple[str, ...] = ()  # thermal zone types to use; none named: chosen by rank
    # hwmon:NAME/temp1, iio:NAME/CHANNEL, file:PATH[:SCALE], mqtt:TOPIC
    external: tuple[str, ...] = ()
    external_max_age_s: Seconds = 5.0
    powerd_socket: Path = Path("/run/gemctl-powerd/powerd.sock")


class MqttConfig(Part):
    """The broker; without `host` there is no MQTT."""

    host: str = ""
    port: Annotated[int, Field(ge=1, le=65535)] = 1883
    protocol: Literal["5", "3.1.1", "auto"] = "auto"
    site: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")] = "site"
    device: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{0,64}$")] = ""  # empty: the host's name
    groups: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")], ...] = ()
    username: str = ""
    password_file: Path | None = None
    ca_file: Path | None = None  # with it, or with tls: TLS
    cert_file: Path | None = None
    key_file: Path | None = None
    tls: bool = False
    insecure: bool = False  # allow plain text to a broker on another machine
    write: bool = True  # may commands change anything
    stats_s: Seconds = 5.0
    reply_cache_s: Seconds = 600.0
    home_assistant: bool = False
    on_loss: Literal["keep", "conservative"] = "keep"

    @field_validator("device")
    @classmethod
    def _no_reserved_word(cls, device: str) -> str:
        if device in ("group", "reply"):
            raise ValueError(f"{device} is a word of the topics; choose another name")
        return device

    @model_validator(mode="after")
    def _plain_stays_here(self) -> MqttConfig:
        local = self.host in ("", "localhost", "::1") or self.host.startswith("127.")
        secure = self.tls or self.ca_file is not None
        if not local and not secure and not self.insecure:
            raise ValueError(
                f"mqtt.host: {self.host} is another machine and TLS is off; set tls = true or "
                "ca_file, or insecure = true on a network that you trust"
            )
        return self


class MetricsConfig(Part):
    """Prometheus and the status page: read only, on loopback or a Unix socket."""

    listen: str = ""  # "127.0.0.1:9464", "[::1]:9464" or "unix:/run/gemctl/metrics.sock"; "": off


class HooksConfig(Part):
    """Commands to run; words, no shell. GEMCTL_MODEL and GEMCTL_DIGEST are in the environment."""

    probation_good: tuple[str, ...] = ()
    probation_bad: tuple[str, ...] = ()
    timeout_s: Seconds = 30.0


class Config(Part):
    """The whole file."""

    daemon: DaemonConfig = DaemonConfig()
    worker: WorkerConfig = WorkerConfig()
    models: ModelsConfig = ModelsConfig()
    throttle: ThrottleConfig = ThrottleConfig()
    sensors: SensorsConfig = SensorsConfig()
    mqtt: MqttConfig = MqttConfig()
    metrics: MetricsConfig = MetricsConfig()
    hooks: HooksConfig = HooksConfig()


def _known(place: tuple[int | str, ...]) -> list[str]:
    """Keys of the table that a place lies in."""
    model: Any = Config
    for part in place[:-1]:
        field = model.model_fields.get(str(part)) if hasattr(model, "model_fields") else None
        model = field.annotation if field is not None else None
    return list(getattr(model, "model_fields", {}))


def _what(error: Any) -> str:
    """One mistake in words of the file."""
    place = ".".join(str(part) for part in error["loc"]) or "file"
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(error["loc"][-1]), _known(error["loc"]), 1)
        return f"{place}: unknown key" + (f", did you mean {near[0]}?" if near else "")
    what = str(error["msg"]).removeprefix("Value error, ").removeprefix("Input should be ")
    return f"{place}: {what}" if "Value error" in error["msg"] else f"{place}: should be {what}"


def _sentence(path: Path, error: ValidationError) -> str:
    whats = [_what(one) for one in error.errors(include_url=False)]
    return f"{path}: {'; '.join(whats[:8])}; all keys: gemctl config schema"


def parse(text: str, path: Path) -> Config:
    """Configuration of a file's text. Raises ApiError("bad_request")."""
    try:
        return Config.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ApiError("bad_request", f"{path}: no TOML: {error}; mend that line") from None
    except ValidationError as error:
        raise ApiError("bad_request", _sentence(path, error)) from None


def load(path: Path | None) -> Config:
    """Configuration of a file; the defaults without one. Raises ApiError("bad_request")."""
    if path is None:
        return Config()
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise ApiError("bad_request", f"{path}: more than {MAX_BYTES} bytes; shorten it")
        return parse(raw.decode("utf-8"), path)
    except OSError as error:
        reason = f"{path}: {error.strerror}; name a file that can be read"
        raise ApiError("bad_request", reason) from None
    except UnicodeDecodeError:
        raise ApiError("bad_request", f"{path}: not UTF-8; save it as UTF-8") from None


def restart_needed(old: Config, new: Config) -> list[str]:
    """Dotted keys that differ and that a running daemon cannot take over."""
    changed: list[str] = []
    for table in FIXED:
        before: dict[str, Any] = getattr(old, table).model_dump()
        after: dict[str, Any] = getattr(new, table).model_dump()
        changed += [f"{table}.{key}" for key in before if before[key] != after[key]]
    return changed
