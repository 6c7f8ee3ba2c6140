"""The configuration file: TOML, one table a part, every key with its unit in its name.

Unknown keys are errors, so that a misspelt one is not silently the default. `load` reads it,
`gemctl config check` prints what `load` says, and the daemon reads it again on SIGHUP or
`gemctl config reload`: what `restart_needed` names keeps its old value until a restart.
`gemctl config schema` prints what stands here. Sentences on mistakes: config_words.py.
"""

from __future__ import annotations

import ipaddress
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from gemctl import config_checks as checks
from gemctl import config_words
from gemctl.config_checks import SOCKET_MOST
from gemctl.errors import ApiError
from gemctl.store.durable import read_plain

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_BYTES = 256 * 1024
FIXED = ("daemon", "metrics", "mqtt", "sensors", "worker")  # tables that need a restart
Celsius = Annotated[float, Field(ge=-40, le=150, strict=True)]
Mode = Literal["performance", "balanced", "aggressive", "conservative", "silent", "off"]
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
Short = Annotated[str, Field(max_length=256)]
Argument = Annotated[str, Field(max_length=4096)]
DAY_S = 86400.0
BYTES_MOST = 1 << 50
Folder = Annotated[Path, AfterValidator(checks.folder)]
File = Annotated[Path, AfterValidator(checks.file)]
Socket = Annotated[Path, AfterValidator(checks.socket)]
Program = Annotated[str, Field(max_length=4096), AfterValidator(checks.program)]
Prompt = Annotated[str, Field(max_length=4096), AfterValidator(checks.prompt)]
Group = Annotated[str, Field(max_length=64), AfterValidator(checks.plain)]
User = Annotated[str, Field(max_length=256), AfterValidator(checks.plain)]
Host = Annotated[str, Field(max_length=253), AfterValidator(checks.host)]
Zone = Annotated[str, Field(max_length=64), AfterValidator(checks.given)]
Command = Annotated[tuple[Argument, ...], Field(max_length=64), AfterValidator(checks.command)]


def key(default: Any, about: str, unit: str = "", **limits: Any) -> Any:
    """A key: its default, what it is for, its unit where it is a number, its limits.

    A number in quotes is no number, and 1 is not true: what is meant is then not certain.
    """
    if isinstance(default, (bool, int, float)):
        limits["strict"] = True
    extra: Any = {"unit": unit} if unit else None
    return Field(default, description=about, json_schema_extra=extra, **limits)


def seconds(default: float, about: str, least: float | None = None) -> Any:
    """A time of up to a day; above 0 where no least one is given."""
    low: dict[str, float] = {"gt": 0} if least is None else {"ge": least}
    return key(default, about, "s", le=DAY_S, **low)


def parse_listen(listen: str) -> tuple[str, int] | Path:
    """Loopback address and port, or the path of a Unix socket. Raises ApiError("bad_request")."""

    def bad(what: str) -> ApiError:
        remedy = "use 127.0.0.1:PORT, [::1]:PORT or unix:/PATH"
        return ApiError("bad_request", f"metrics.listen '{listen[:100]}': {what}; {remedy}")

    if listen.startswith("unix:"):
        path = Path(listen[5:])
        if not path.is_absolute() or len(os.fsencode(path)) > SOCKET_MOST or "\0" in listen:
            raise bad(f"no absolute path of at most {SOCKET_MOST} bytes")
        return path
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[0-9.]+|localhost):(\d{1,5})", listen, re.ASCII)
    if not match or int(match[2]) > 65535:
        raise bad("not an address and a port")
    host = "127.0.0.1" if match[1] == "localhost" else match[1].strip("[]")
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        raise bad("not an address") from None
    if not loopback:
        raise bad("other machines could reach it")
    return host, int(match[2])


def _known(parse: Callable[[str], Any], word: str) -> None:
    """What the daemon would refuse at its start is a mistake in the file."""
    try:
        parse(word)
    except ApiError as error:
        text = {"text": error.message.partition("': ")[2], "word": checks.shown(word)}
        raise PydanticCustomError("gemctl", "{word}: {text}", text) from None


class Part(BaseModel):
    """A table of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def _given(self, *keys: str) -> str:
        """The first of some keys that stands in the file."""
        return next((key for key in keys if key in self.model_fields_set), keys[0])


class DaemonConfig(Part):
    """Places and permissions. A change needs a restart."""

    socket: Socket = key(
        Path("/run/gemctl/gemctl.sock"),
        "where the daemon listens; with gemctl.socket systemd listens there instead",
    )
    state: Folder = key(Path("/var/lib/gemctl"), "folder of the store and of state.json")
    read_group: Group = key(
        "gemctl",
        "who may look: members of this group; root and the daemon's own user may do everything",
    )
    write_group: Group = key("gemctl-admin", "who may also change something")
    log_prompts: bool = key(False, "put prompts and answers into request.text events")
    connections: int = key(64, "most connections at once", "connections", ge=1, le=1024)


class WorkerConfig(Part):
    """One process of the engine for every loaded model. A change needs a restart."""

    program: Program = key("gemrun", "command of the engine, a name or an absolute path")
    threads: int = key(0, "threads of a worker; 0: the engine decides", "threads", ge=0, le=8)
    prefill_batch_size: int = key(
        64,
        "tokens of a prompt that are computed together; the duty changes between two such "
        "steps; 0: the engine decides",
        "tokens",
        ge=0,
        le=4096,
    )
    lock_memory: bool = key(
        False,
        "keep the memory of workers from being paged out, as far as the limit of locked memory "
        "(LimitMEMLOCK) allows",
    )
    start_timeout_s: float = seconds(60.0, "a worker that is not ready by then has failed")
    heartbeat_s: float = seconds(1.0, "between two questions whether a worker is alive")
    hang_s: float = seconds(20.0, "no step, or no answer, for so long: the worker is killed")
    crashes: int = key(
        3, "so many within crash_window_s: the model is faulted", "crashes", ge=1, le=100
    )
    crash_window_s: float = seconds(300.0, "older crashes are forgotten")
    backoff_s: float = seconds(0.2, "before the first restart; it doubles with every further one")
    backoff_most_s: float = seconds(30.0, "longest time before a restart")

    @model_validator(mode="after")
    def _fits_together(self) -> WorkerConfig:
        if self.hang_s <= self.heartbeat_s:
            what = f"is no more than heartbeat_s ({self.heartbeat_s:g}); give more"
            one = self._given("hang_s", "heartbeat_s")
            raise checks.wrong(f"{self.hang_s:g}", what, key=one)
        if self.backoff_most_s < self.backoff_s:
            what = f"is less than backoff_s ({self.backoff_s:g}); give more"
            one = self._given("backoff_most_s", "backoff_s")
            raise checks.wrong(f"{self.backoff_most_s:g}", what, key=one)
        return self


class ModelsConfig(Part):
    """Store, replacement and requests."""

    signature: Literal["required", "preferred", "off"] = key(
        "preferred",
        "of every version that comes in: required lets only valid ones in, preferred refuses "
        "those that are wrong, off looks at none",
    )
    keys_dir: Folder = key(Path("/etc/gemctl/keys.d"), "folder of the public keys that are trusted")
    allow_foreign_board: bool = key(False, "take versions that were compiled for another board")
    keep: int = key(2, "good versions that stay in the store", "versions", ge=1, le=16)
    size_most_bytes: int = key(64 << 30, "larger files are refused", "bytes", ge=1, le=BYTES_MOST)
    memory_most_bytes: int = key(
        0,
        "memory of all models together; 0: 65 % of the machine's",
        "bytes",
        ge=0,
        le=BYTES_MOST,
    )
    prefault_mbps: float = key(
        800.0,
        "most speed at which a candidate is read from the disk, in decimal megabytes a second",
        "MB/s",
        gt=0,
        le=1_000_000,
    )
    warmup_prompt: Prompt = key(
        "Hello", "a candidate answers it before it serves; empty: none is asked"
    )
    drain_s: float = seconds(30.0, "a request on the old version may take so long after a flip")
    probation_s: float = seconds(60.0, "a new version is watched for so long", 0)
    probation_requests: int = key(
        20,
        "or until it has given so many answers",
        "answers",
        ge=0,
        le=1_000_000,
    )
    queue: int = key(64, "waiting requests of a model; more get busy", "requests", ge=1, le=4096)
    request_timeout_s: float = seconds(120.0, "of requests that name no deadline")
    auto_reset_kv_cache: bool = key(False, "empty the KV cache after an answer that fills it")
    auto_reset_percent: int = key(
        95,
        "so much of it in use is full; 0: it is emptied after every answer",
        "%",
        ge=0,
        le=100,
    )
    speculate: int = key(0, "tokens guessed ahead of each step", "tokens", ge=0, le=6)


class ThrottleConfig(Part):
    """Policy of the throttle; gemctl throttle overrides it."""

    mode: Mode = key("balanced", "how early and how much it slows down")
    temp_c: Celsius | None = key(
        None, "threshold; absent: the artifact's, or 10 C below the kernel's passive trip", "C"
    )
    hysteresis_c: float = key(5.0, "so far below the threshold it has cooled", "C", ge=3, le=30)
    horizon_s: float = key(30.0, "how far ahead it predicts", "s", ge=1, le=300)
    ambient_c: Celsius | None = key(None, "temperature of the surroundings, where known", "C")
    rtheta_c_per_w: Annotated[float, Field(gt=0, le=100, strict=True)] | None = key(
        None, "thermal resistance, from gemctl calibrate thermal", "C/W"
    )
    tau_s: Annotated[float, Field(gt=0, le=3600, strict=True)] | None = key(
        None, "thermal time constant, from gemctl calibrate thermal", "s"
    )
    allow_unload: bool = key(False, "may its last step free the memory of models")


class SensorsConfig(Part):
    """Where temperature and power come from. A change needs a restart."""

    sysfs_root: Folder = key(Path("/"), "put before /sys and /proc; another one in tests")
    zones: tuple[Zone, ...] = key(
        (), "types of the thermal zones to use; empty: chosen by rank", max_length=64
    )
    external: tuple[Short, ...] = key(
        (),
        "more sensors: hwmon:NAME/temp1, iio:NAME/CHANNEL, file:PATH[:SCALE], mqtt:TOPIC; they "
        "only ever make the throttle stricter",
        max_length=16,
    )
    external_max_age_s: float = seconds(
        5.0,
        "an external value that is older counts as unknown; above 5 s the throttle's own limit "
        "holds",
    )
    powerd_socket: Socket = key(
        Path("/run/gemctl-powerd/powerd.sock"), "of gemctl-powerd, which caps clocks"
    )

    @field_validator("external")
    @classmethod
    def _understood(cls, external: tuple[str, ...]) -> tuple[str, ...]:
        from gemctl.board.sensors import parse_source

        for spec in external:
            _known(parse_source, spec)
        return external


class MqttConfig(Part):
    """The broker; without a host there is no MQTT. A change needs a restart."""

    host: Host = key("", "name or address of the broker; empty: no MQTT")
    port: int = key(1883, "of the broker; 8883 is usual with TLS", "port", ge=1, le=65535)
    protocol: Literal["5", "3.1.1", "auto"] = key(
        "auto", "version of MQTT; auto: 5, and 3.1.1 where the broker does not speak it"
    )
    site: Word = key("site", "a level of the topics: letters, digits, _ and -")
    device: str = key(
        "",
        "name of this device, another level: letters, digits, _ and -; empty: the host's name",
        pattern=r"^[A-Za-z0-9_-]{0,64}$",
    )
    groups: tuple[Word, ...] = key(
        (), "groups whose commands it hears: letters, digits, _ and -", max_length=64
    )
    username: User = key("", "user at the broker; empty: none")
    password_file: File | None = key(
        None, "its first line is the password; read again at every attempt"
    )
    ca_file: File | None = key(None, "authority of the broker's certificate; means TLS")
    cert_file: File | None = key(None, "this device's own certificate")
    key_file: File | None = key(None, "and its key")
    tls: bool = key(False, "TLS with the system's authorities")
    insecure: bool = key(False, "allow plain text to a broker on another machine")
    write: bool = key(True, "may commands change anything")
    require_signed: bool = key(
        False,
        "a command makes a version serve only if a key of models.keys_dir has signed it, "
        "whatever models.signature allows on this device",
    )
    stats_s: float = seconds(5.0, "between two messages with figures")
    reply_cache_s: float = seconds(600.0, "a command that comes again so late is done again")
    home_assistant: bool = key(False, "announce this device to Home Assistant")
    on_loss: Literal["keep", "conservative"] = key(
        "keep", "mode of the throttle while no broker can be reached"
    )

    @field_validator("device")
    @classmethod
    def _no_reserved_word(cls, device: str) -> str:
        if device in ("group", "reply"):
            text = "{word} is a word of the topics; choose another name"
            raise PydanticCustomError("gemctl", text, {"word": device})
        return device

    @model_validator(mode="after")
    def _fits_together(self) -> MqttConfig:
        local = self.host in ("", "localhost") or checks.is_loopback(self.host)
        secure = self.tls or self.ca_file is not None
        if not local and not secure and not self.insecure:
            text = "{host} is another machine and TLS is off; set tls = true or ca_file, or "
            text += "insecure = true on a network that you trust"
            raise PydanticCustomError("gemctl", text, {"host": self.host, "key": "host"})
        if self.cert_file is not None and not secure:
            what = "means TLS, which is off; set tls = true or ca_file"
            raise checks.wrong(self.cert_file, what, key="cert_file")
        if self.key_file is not None and self.cert_file is None:
            what = "is the key of no certificate; set cert_file"
            raise checks.wrong(self.key_file, what, key="key_file")
        if self.password_file is not None and not self.username:
            what = "is the password of nobody; set username"
            raise checks.wrong(self.password_file, what, key="password_file")
        return self


class MetricsConfig(Part):
    """Prometheus and the status page: read only. A change needs a restart."""

    listen: str = key(
        "",
        "loopback or a Unix socket: 127.0.0.1:9464, [::1]:9464, unix:/run/gemctl/metrics.sock; "
        "empty: off",
        max_length=256,
    )

    @field_validator("listen")
    @classmethod
    def _understood(cls, listen: str) -> str:
        if checks.plain(listen):
            _known(parse_listen, listen)
        if listen.startswith("unix:"):
            checks.socket(Path(listen[5:]))
        return listen


class HooksConfig(Part):
    """Commands to run; words, no shell. GEMCTL_MODEL and GEMCTL_DIGEST are in the environment."""

    probation_good: Command = key((), "when a version has proved good")
    probation_bad: Command = key((), "when one was rolled back")
    timeout_s: float = seconds(30.0, "a command that takes longer is killed")


class Config(Part):
    """The whole file."""

    daemon: DaemonConfig = key(DaemonConfig(), "places and permissions")
    worker: WorkerConfig = key(WorkerConfig(), "processes of the engine")
    models: ModelsConfig = key(ModelsConfig(), "store, replacement and requests")
    throttle: ThrottleConfig = key(ThrottleConfig(), "policy of the throttle")
    sensors: SensorsConfig = key(SensorsConfig(), "temperature and power")
    mqtt: MqttConfig = key(MqttConfig(), "the broker")
    metrics: MetricsConfig = key(MetricsConfig(), "Prometheus and the status page")
    hooks: HooksConfig = key(HooksConfig(), "commands to run")

    @model_validator(mode="after")
    def _places_differ(self) -> Config:
        listen = self.metrics.listen
        places = {
            "daemon.state": self.daemon.state,
            "daemon.socket": self.daemon.socket,
            "sensors.powerd_socket": self.sensors.powerd_socket,
            **({"metrics.listen": Path(listen[5:])} if listen.startswith("unix:") else {}),
        }
        seen: dict[str, str] = {}
        for name, path in places.items():
            other = seen.setdefault(os.path.normpath(path), name)
            if other != name:
                table, _, one = name.partition(".")
                given = one in getattr(self, table).model_fields_set
                mine, theirs = (name, other) if given else (other, name)
                raise checks.wrong(path, f"is {theirs} already; use another path", key=mine)
        return self


def parse(text: str, path: Path) -> Config:
    """Configuration of a file's text. Raises ApiError("bad_request"), a line for each mistake."""
    try:
        return Config.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        reason = config_words.of_syntax(str(path), error)
    except RecursionError:
        reason = f"{path}: nested too deep; write tables and keys"
    except ValidationError as error:
        reason = config_words.of_values(str(path), text, error, Config)
    except ValueError as error:  # a number of more digits than Python reads
        reason = config_words.of_syntax(str(path), error)
    raise ApiError("bad_request", reason)


def load(path: Path | None) -> Config:
    """Configuration of a file; the defaults without one. Raises ApiError("bad_request").

    Of a regular file only: nobody waits for the writer of a pipe.
    """
    if path is None:
        return Config()
    try:
        raw = read_plain(path, MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise ApiError("bad_request", f"{path}: more than {MAX_BYTES} bytes; shorten it")
        return parse(raw.decode("utf-8"), path)
    except OSError as error:
        reason = f"{path}: {error.strerror}; name a file that can be read"
        raise ApiError("bad_request", reason) from None
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ApiError("bad_request", f"{path}:{line}: not UTF-8; save it as UTF-8") from None


def restart_needed(old: Config, new: Config) -> list[str]:
    """Dotted keys that differ and that a running daemon cannot take over."""
    changed: list[str] = []
    for table in FIXED:
        before: dict[str, Any] = getattr(old, table).model_dump()
        after: dict[str, Any] = getattr(new, table).model_dump()
        changed += [f"{table}.{key}" for key in before if before[key] != after[key]]
    return changed
