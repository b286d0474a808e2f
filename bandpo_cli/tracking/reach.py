"""Whether a server answers at all, asked before MLflow is: its import alone costs seconds of the processor's time."""

from __future__ import annotations

import socket
import ssl
import urllib.error
import urllib.request
from http.client import HTTPException
from urllib.parse import urlsplit

_DATABASE_PORTS = {"postgresql": 5432, "postgres": 5432, "mysql": 3306, "mariadb": 3306, "mssql": 1433}


def check_reachable(uri: str, timeout_s: float) -> None:
    """Return when the store `uri` answers, or is of a kind that only MLflow itself can ask (a file, databricks).

    A web server answers with any status below 500, a database server by taking a connection.

    Raises:
        OSError: nobody answers within `timeout_s` seconds, or a web server says that it cannot (5xx).
    """
    try:
        parts = urlsplit(uri)
        scheme, host, port = parts.scheme.partition("+")[0], parts.hostname, parts.port
    except ValueError:  # MLflow has the better words for an address that is none
        return
    if host is None:
        return
    if scheme in ("http", "https"):
        place = f"[{host}]" if ":" in host else host
        _ask(f"{scheme}://{place}{f':{port}' if port else ''}{parts.path.rstrip('/')}/health", timeout_s)
    elif scheme in _DATABASE_PORTS:
        socket.create_connection((host, port or _DATABASE_PORTS[scheme]), timeout_s).close()


def _ask(url: str, timeout_s: float) -> None:
    # Nothing is sent here but the question, so whose certificate it is can be left to MLflow, with its settings for it.
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context))
    try:
        opener.open(url, timeout=timeout_s).close()
    except urllib.error.HTTPError as error:
        error.close()
        if error.code >= 500:
            raise ConnectionError(f"it answers {error.code} {error.reason}") from None
    except TimeoutError:
        raise TimeoutError(f"no answer within {timeout_s:g} s") from None
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise TimeoutError(f"no answer within {timeout_s:g} s") from None
        raise ConnectionError(str(error.reason)) from None
    except HTTPException as error:
        raise ConnectionError(f"it does not answer in HTTP ({type(error).__name__})") from None
