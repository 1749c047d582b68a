"""The table ``[server]`` of the configuration, and the options of ``specdec serve``."""

from __future__ import annotations

import re
from typing import ClassVar

from attrs import field, frozen
from attrs.validators import optional

from specdec.config import validators as check
from specdec.config.problems import SettingsConflictError
from specdec.config.sizes import Size
from specdec.errors import ConfigError

_ORIGIN = re.compile(r"""\*|null|[a-zA-Z][\w+.-]*://[^/\s"',]+""")


@frozen(kw_only=True)
class ServerConfig:
    """How the server listens, whom it serves, and its limits."""

    SECTION: ClassVar[str] = "server"

    host: str = field(default="127.0.0.1", validator=check.text())
    """Address to listen on; 0.0.0.0 is every IPv4 address of the machine."""
    port: int = field(default=8000, validator=check.integer(0, 65535))
    """Port to listen on; 0 takes a free one."""
    served_model_name: tuple[str, ...] = field(default=(), converter=check.as_tuple, validator=check.names())
    """Names that requests may use for the model, the first one in answers; the model's own when not set."""
    api_key: tuple[str, ...] = field(
        default=(), converter=check.as_tuple, validator=check.names(), metadata={"secret": True}
    )
    """Keys of which requests must bring one as "Authorization: Bearer KEY"; without any the server is open."""
    allowed_origins: tuple[str, ...] = field(default=(), converter=check.as_tuple, validator=check.names())
    """Web origins that browsers may call from (CORS), * for all."""
    max_body_size: Size = field(default="8MiB", validator=check.size())
    """Largest body of a request."""
    max_body_parts: int = field(default=300_000, validator=check.integer(1))
    """Most lists, objects and keys in a body, all together; reading many holds up every client."""
    header_timeout: float = field(default=30.0, validator=check.number(0))
    """Seconds that a client has to send a request's headers, from its connection on; 0 means no limit."""
    request_timeout: float = field(default=600.0, validator=check.number(0))
    """Seconds until a request is ended, whatever it has by then; 0 means no limit."""
    shutdown_timeout: float = field(default=30.0, validator=check.number(0))
    """Seconds that running requests have to finish after SIGTERM, SIGINT or SIGHUP."""
    stall_timeout: float = field(default=120.0, validator=check.number(above=0))
    """/health turns 503 when requests run and no step has ended for this many seconds."""
    retry_after: int = field(default=1, validator=check.integer(1, 3600))
    """Seconds that refused clients are told to wait (Retry-After)."""
    max_choices: int = field(default=128, validator=check.integer(1, 16384))
    """Most choices that one request may ask for, all its prompts together."""
    max_logprobs: int = field(default=20, validator=check.integer(0))
    """Most alternatives per token that a request may ask for."""
    max_strings: int = field(default=1024, validator=check.integer(0))
    """Most stop strings, and most bad words, of one request; they are looked for after every token."""
    max_string_characters: int = field(default=65536, validator=check.integer(0))
    """Most characters of all stop strings together, and of all bad words, which are tokenised between steps."""
    max_grammar_size: Size = field(default="256KiB", validator=check.size())
    """Largest schema, regular expression, grammar or list of choices of a request; large ones compile for very long."""
    chat_template: str | None = field(default=None, validator=optional(check.text()))
    """File with a chat template to use instead of the model's own."""
    vllm_metrics: bool = field(default=False, validator=check.boolean())
    """Show the metrics under vLLM's names too, for dashboards that exist."""
    page: bool = field(default=True, validator=check.boolean())
    """Show a page at / to try the model in a browser."""
    allow_benchmark_verifier: bool = field(default=False, validator=check.boolean())
    """Serve with a verifier that is meant for benchmarks and makes wrong text."""
    ssl_certfile: str | None = field(default=None, validator=optional(check.text()))
    """Certificate (PEM) for HTTPS."""
    ssl_keyfile: str | None = field(default=None, validator=optional(check.text()))
    """The certificate's private key (PEM)."""

    def __attrs_post_init__(self) -> None:
        if not all(key.isascii() and key.isprintable() and key == key.strip() for key in self.api_key):
            raise ConfigError(
                "server.api_key: a key has a character that clients cannot send in a header. Use ASCII letters, digits "
                "and punctuation, without spaces around them",
                path="server.api_key",
            )
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"server.allowed_origins: {origin!r} is no origin. Give * or an origin without a path, such as "
                    "https://app.example; several in a list of the file, or by repeating the option",
                    path="server.allowed_origins",
                )
        if self.ssl_keyfile and not self.ssl_certfile:
            raise SettingsConflictError(
                "server.ssl_keyfile is set without server.ssl_certfile: HTTPS needs the certificate as well.",
                path="server.ssl_certfile",
            )
