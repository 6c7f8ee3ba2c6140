"""One connection to a broker: aiomqtt's client, with what it leaves open closed.

Only this module imports aiomqtt; import it inside a function. It differs from aiomqtt's client so:

- A message is handed on as it arrives, not queued: the receiver bounds what it keeps.
- A packet longer than PACKET_BYTES ends the connection before it is read. MQTT 5 brokers are told
  the limit and keep such messages to themselves; MQTT 3.1.1 has no word for it.
- A broker that closes the connection instead of answering is noticed at once, an attempt that
  fails leaves no socket behind, and no socket is watched after its end.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiomqtt
from aiomqtt.client import ProtocolVersion
from paho.mqtt.client import MQTT_CLEAN_START_FIRST_ONLY
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from gemctl.config import MqttConfig
from gemctl.errors import ApiError
from gemctl.mqtt.commands import Arrived
from gemctl.mqtt.outbox import Item
from gemctl.store.durable import read_plain

PACKET_BYTES = 128 * 1024  # a payload, its topic and its properties
SESSION_S = 3600  # MQTT 5: the broker keeps commands for so long while we are away
KEEPALIVE_S = 30
TIMEOUT_S = 10.0
PASSWORD_BYTES = 4096
UNSUPPORTED = 132  # reason codes of MQTT 5
PROTOCOL_ERROR = 130
WHO = (133, 134, 135)  # client identifier, password, not authorised
REFUSED = 128  # this and above, in answers to a subscription

_LOG = logging.getLogger("gemctl.mqtt.client")
_LOG.setLevel(logging.CRITICAL)  # whatever goes wrong is reported by whoever uses the client


class LinkError(Exception):
    """No connection, or no more. The text is the reason, ready for a sentence.

    `unsupported`: the broker does not speak MQTT 5. `silent`: it closed or kept silent instead of
    answering, as some old ones do. `damaged`: it sent what cannot be read. `denied`: it does not
    let this user in; whose options say who that is, the caller knows.
    """

    def __init__(
        self,
        reason: str,
        *,
        unsupported: bool = False,
        silent: bool = False,
        damaged: bool = False,
        denied: bool = False,
    ) -> None:
        super().__init__(reason)
        self.unsupported, self.silent = unsupported, silent
        self.damaged, self.denied = damaged, denied


@dataclass(frozen=True)
class Will:
    """What the broker publishes, retained, when the client is gone without a word."""

    topic: str
    payload: bytes


def _password(path: Path | None) -> str | None:
    """First line of the password file. Raises ApiError."""
    if path is None:
        return None
    try:
        line = read_plain(path, PASSWORD_BYTES).split(b"\n")[0].rstrip(b"\r")
        return line.decode("utf-8")
    except OSError as error:
        reason = f"mqtt.password_file: {path}: {error.strerror}; name a file that gemctld can read"
        raise ApiError("bad_request", reason) from None
    except UnicodeDecodeError:
        reason = f"mqtt.password_file: {path}: not UTF-8; save it as UTF-8"
        raise ApiError("bad_request", reason) from None


def _tls(config: MqttConfig) -> ssl.SSLContext | None:
    """TLS with the configured authority (else the system's) and certificate. Raises ApiError."""
    if not config.tls and config.ca_file is None:
        return None
    try:
        for file in (config.ca_file, config.cert_file, config.key_file):
            if file is not None and file.exists() and not file.is_file():
                raise OSError(errno.EINVAL, f"{file} is no regular file")  # nobody waits for a pipe
        context = ssl.create_default_context(cafile=config.ca_file)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if config.cert_file is not None:
            context.load_cert_chain(config.cert_file, config.key_file)
    except OSError as error:  # ssl.SSLError is one
        what = error.strerror or str(error)
        reason = f"mqtt: ca_file, cert_file or key_file: {what}; name readable PEM files"
        raise ApiError("bad_request", reason) from None
    return context


def _connect_properties(session_s: int) -> Properties:
    properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
    properties.SessionExpiryInterval = session_s
    properties.MaximumPacketSize = PACKET_BYTES
    return properties


def _arrived(message: Any) -> Arrived:
    """Of paho's message. Raises UnicodeDecodeError for a topic that is not UTF-8."""
    extra = getattr(message, "properties", None)
    return Arrived(
        topic=message.topic,
        payload=bytes(message.payload),
        retain=bool(message.retain),
        response_topic=getattr(extra, "ResponseTopic", ""),
        correlation=bytes(getattr(extra, "CorrelationData", b"")),
        expiry_s=getattr(extra, "MessageExpiryInterval", None),
    )


class Link(aiomqtt.Client):
    """A client of one connection: open, use, close, and make another."""

    def __init__(
        self,
        config: MqttConfig,
        protocol: str,
        identifier: str,
        receive: Callable[[Arrived], None],
        will: Will | None = None,
        clean: bool = False,
        session_s: int = SESSION_S,
    ) -> None:
        """`protocol` is "5" or "3.1.1" (without a session). Raises ApiError for a bad file."""
        self.v5 = protocol == "5"
        self._receive = receive
        self._too_long = False
        self.unreadable = 0
        last = None if will is None else aiomqtt.Will(will.topic, will.payload, 1, True)
        super().__init__(
            config.host,
            config.port,
            username=config.username or None,
            password=_password(config.password_file),
            logger=_LOG,
            identifier=identifier,
            protocol=ProtocolVersion.V5 if self.v5 else ProtocolVersion.V311,
            will=last,
            clean_session=None if self.v5 else True,
            clean_start=clean if self.v5 else MQTT_CLEAN_START_FIRST_ONLY,
            properties=_connect_properties(session_s) if self.v5 else None,
            timeout=TIMEOUT_S,
            keepalive=KEEPALIVE_S,
            tls_context=_tls(config),
            socket_options=[(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)],  # else 40 ms a reply
        )
        self.pending_calls_threshold = 1 << 16  # nobody reads its warning
        self._limit_packets()

    def _limit_packets(self) -> None:
        paho: Any = self._client
        receive = paho._sock_recv

        def limited(size: int) -> bytes:
            """paho asks for all that a packet still lacks."""
            if size > PACKET_BYTES:
                self._too_long = True
                raise OSError(errno.EMSGSIZE, "packet too long")
            data: bytes = receive(size)
            return data

        paho._sock_recv = limited

    def _on_message(self, client: Any, userdata: Any, message: Any) -> None:
        try:
            arrived = _arrived(message)
        except (UnicodeDecodeError, ValueError):
            self.unreadable += 1
            return
        self._receive(arrived)

    def _on_disconnect(
        self,
        client: Any,
        userdata: Any,
        flags: Any,
        reason_code: ReasonCode,
        properties: Any = None,
    ) -> None:
        if not self._connected.done():
            self._connected.set_exception(aiomqtt.MqttError("closed without an answer"))
        super()._on_disconnect(client, userdata, flags, reason_code, properties)

    def _on_socket_register_write(self, client: Any, userdata: Any, sock: Any) -> None:
        self._loop.call_soon_threadsafe(self._start_writing, sock)

    def _start_writing(self, sock: Any) -> None:
        """Only while it is still our socket: its number may be another's by now."""
        ours: Any = self._client.socket()
        if ours is sock:
            self._loop.add_writer(sock.fileno(), self._write)

    def _write(self) -> None:
        try:
            self._client.loop_write()
        except Exception as error:
            if not self._disconnected.done():
                self._disconnected.set_exception(error)

    async def open(self) -> None:
        """Connect. Raises LinkError."""
        try:
            await self.__aenter__()
        except aiomqtt.MqttError as error:
            self.drop()
            raise _no_connection(error) from None
        except Exception as error:  # a host name that is none, for instance
            self.drop()
            raise LinkError(f"{self._hostname}: {type(error).__name__}: {error}") from None
        except BaseException:
            self.drop()
            raise

    def drop(self) -> None:
        """Close the socket without a word; the broker then publishes the will."""
        paho: Any = self._client
        with contextlib.suppress(Exception):
            paho._sock_close()
        for future in (self._connected, self._disconnected):
            if future.done() and not future.cancelled():
                future.exception()  # asyncio complains of one that nobody looked at

    async def close(self) -> None:
        """Say goodbye, so that no will is published, and close."""
        with contextlib.suppress(aiomqtt.MqttError):
            await self.__aexit__(None, None, None)
        self.drop()

    async def lost(self) -> LinkError:
        """Wait until the connection is lost, and say why."""
        try:
            async for _ in self.messages:
                pass
        except aiomqtt.MqttError as error:
            if self._too_long:
                return LinkError(f"a packet of more than {PACKET_BYTES} bytes", damaged=True)
            return _lost(error.__cause__ or error)
        return LinkError("connection closed")

    async def listen(self, topic: str, qos: int = 1) -> bool:
        """Subscribe; False where the broker refuses. Raises LinkError."""
        options = SubscribeOptions(qos, retainAsPublished=True) if self.v5 else None
        try:
            codes = await self.subscribe(topic, 0 if self.v5 else qos, options)
        except aiomqtt.MqttError as error:
            raise _lost(error) from None
        return all((code if isinstance(code, int) else code.value) < REFUSED for code in codes)

    async def leave(self, topic: str) -> None:
        """End a subscription. Raises LinkError."""
        try:
            await self.unsubscribe(topic)
        except aiomqtt.MqttError as error:
            raise _lost(error) from None

    async def send(self, item: Item) -> None:
        """Publish, and wait for the broker's word with QoS 1. Raises LinkError."""
        properties = None
        if self.v5 and item.correlation:
            properties = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
            properties.CorrelationData = item.correlation
        try:
            await self.publish(item.topic, item.payload, item.qos, item.retain, properties)
        except aiomqtt.MqttError as error:
            raise _lost(error) from None


def _no_connection(error: aiomqtt.MqttError) -> LinkError:
    code = getattr(error, "rc", None)
    if isinstance(code, ReasonCode):
        return LinkError(
            f"refused by the broker: {str(code).lower()}",
            unsupported=code.value == UNSUPPORTED,
            denied=code.value in WHO,
        )
    text = str(error) or "no answer"
    silent = text in ("closed without an answer", "Operation timed out")
    return LinkError(text[:1].lower() + text[1:], silent=silent)


def _lost(error: BaseException) -> LinkError:
    code = getattr(error, "rc", None)
    if isinstance(code, ReasonCode):
        return LinkError(str(code).lower(), damaged=code.value == PROTOCOL_ERROR)
    if isinstance(error, (OSError, aiomqtt.MqttError)):
        return LinkError(str(error)[:1].lower() + str(error)[1:] or "connection lost")
    return LinkError("the broker sent what cannot be read", damaged=True)
