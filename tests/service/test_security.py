"""What somebody who should not gets from the service: nothing, and at no great cost."""

from __future__ import annotations

import http.client
import json
import resource
import socket
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from processes import Template
from services import TOKEN, WORKLOAD, Service, plan_of_acts, token_file, until

from compilecache.errors import PlanError, UntrustedArtifact
from warmup.service.settings import Settings

PROTECTED = [
    ("GET", "/v1/about"),
    ("GET", "/v1/jobs"),
    ("POST", "/v1/jobs"),
    ("GET", "/v1/jobs/0123456789abcdef"),
    ("POST", "/v1/jobs/0123456789abcdef/cancel"),
    ("POST", "/v1/jobs/0123456789abcdef/retry"),
    ("GET", "/v1/jobs/0123456789abcdef/events"),
    ("GET", "/v1/events"),
    ("GET", "/v1/fingerprints"),
    ("GET", "/v1/fingerprints/" + "0" * 32),
    ("GET", "/metrics"),
]


@pytest.mark.parametrize(
    "given", ["", "Bearer wrong", f"Bearer {TOKEN}x", "Basic dTpw", "Bearer", f"bearer{TOKEN}"]
)
def test_without_the_token_nothing_is_told_and_nothing_done(locked: Service, given: str) -> None:
    """Every endpoint but health and the empty page answers 401, and says what to send."""
    for method, path in PROTECTED:
        body = {"plan": plan_of_acts("quick")} if method == "POST" else None
        answer = locked.ask(method, path, body, {"Authorization": given})
        assert answer.status == 401, path
        assert answer.headers["www-authenticate"] == "Bearer"
        assert TOKEN.encode() not in answer.body
    assert locked.client.jobs().jobs == ()


def test_every_endpoint_is_either_protected_or_meant_to_be_open(locked: Service) -> None:
    """A new endpoint must be put on one of the two lists."""
    document = locked.ask("GET", "/openapi.json").json
    paths = document["paths"]
    assert isinstance(paths, dict)
    found = {(method.upper(), path) for path, item in paths.items() for method in item}
    known = {
        (method, path.replace("0123456789abcdef", "{job_id}").replace("0" * 32, "{digest}"))
        for method, path in PROTECTED
    }
    known |= {("GET", "/healthz"), ("GET", "/readyz"), ("POST", "/login"), ("POST", "/logout")}
    assert found == known


def test_health_and_the_empty_page_need_no_token(locked: Service) -> None:
    """Probes have none, and the page asks for one."""
    for path in ("/healthz", "/readyz", "/", "/page.js", "/page.css"):
        assert locked.ask("GET", path, headers={"Authorization": ""}).status == 200


def test_a_session_is_good_for_the_page_and_not_from_other_sites(locked: Service) -> None:
    """The cookie is out of reach of scripts; a request that another site's page sent is refused."""
    assert locked.ask("POST", "/login", {"token": "wrong"}).status == 401
    answer = locked.ask("POST", "/login", {"token": TOKEN})
    assert answer.status == 204
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    session = {"Authorization": "", "Cookie": cookie.partition(";")[0]}
    assert TOKEN not in cookie
    assert locked.ask("GET", "/v1/jobs", headers=session).status == 200
    foreign = {**session, "Origin": "http://evil.example"}
    body = {"plan": plan_of_acts("quick")}
    assert locked.ask("POST", "/v1/jobs", body, foreign).status == 403
    assert (
        locked.ask("POST", "/v1/jobs", body, {**session, "Sec-Fetch-Site": "cross-site"}).status
        == 403
    )
    assert locked.ask("POST", "/v1/jobs", body, {**session, "Origin": locked.url}).status == 201
    until_when, _, seal = session["Cookie"].partition("=")[2].partition(".")
    for forged in (f"{int(until_when) + 9}.{seal}", f"{until_when}.", ".", "٣.x", "1" * 5000):
        value = f"warmup_session={forged}".encode().decode("latin-1")
        given = {"Authorization": "", "Cookie": value}
        assert locked.ask("GET", "/v1/jobs", headers=given).status == 401


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8480", "127.0.0.1.evil.example", "[::2]", ""]
)
def test_without_a_token_other_names_are_refused(shared: Service, host: str) -> None:
    """A page that points its own name at this host gets nothing."""
    answer = shared.ask("GET", "/v1/jobs", headers={"Host": host})
    assert answer.status in (400, 421)
    assert b'"jobs"' not in answer.body


def test_without_a_token_other_sites_pages_may_not_submit(shared: Service) -> None:
    """Not even as plain text, which browsers send without asking."""
    body = {"plan": plan_of_acts("quick")}
    for headers in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "same-site"}):
        assert shared.ask("POST", "/v1/jobs", body, headers).status == 403
    assert shared.ask("POST", "/v1/jobs", body, {"Content-Type": "text/plain"}).status == 422


@pytest.mark.parametrize(
    "name", ["os:system", "workloads:passed_by", f"{WORKLOAD} ", "", "../evil:run", "/etc/evil:x"]
)
def test_a_workload_off_the_list_is_refused_before_it_is_imported(
    shared: Service, name: str
) -> None:
    """The answer names the setting that would allow it."""
    answer = shared.ask("POST", "/v1/jobs", {"plan": plan_of_acts("quick", workload=name)})
    assert answer.status == 403
    assert "'workloads'" in str(answer.json["next_step"])


SPEC = {"dims": {"batch": 2}}
BAD_PLANS: list[tuple[dict[str, object], int, str]] = [
    ({"settings": {"config": "/etc/passwd"}}, 403, "settings.config"),
    ({"settings": {"config": "../../secret"}}, 403, "settings.config"),
    ({"settings": {"build": "os:system"}}, 403, "settings.build"),
    ({"settings": {"deep": [{"er": "~/.ssh/id"}]}}, 403, "settings.deep.er"),
    ({"settings": {"C:\\evil": 1}}, 403, "settings"),
    ({"specs": [{"dims": {"mask": "../x"}}]}, 403, "specs.0.dims.mask"),
    ({"specs": [{"function": "../../x"}]}, 403, "specs.0.function"),
    ({"specs": [{"dtype": "a/b"}]}, 403, "specs.0.dtype"),
    ({"specs": [{"example": {"x": "/dev/sda"}}]}, 403, "specs.0.example.x"),
    ({"compile_options": {"options": {"cpp.cxx": ["sh"]}}}, 403, "options"),
    ({"compile_options": {"backend": "evil"}}, 403, "backend"),
    ({"compile_options": {"mode": "x"}}, 403, "mode"),
    ({"specs": [{"dims": {"a": "x\r\nSet-Cookie: y"}}]}, 422, "specs.0.dims.a"),
    ({"specs": [{"dims": {"a": "x" * 300}}]}, 422, "specs.0.dims.a"),
    ({"specs": [{"dims": {"n": n}} for n in range(1, 600)]}, 422, "1198 targets"),
    ({"specs": []}, 422, "specs"),
    ({"unknown": 1}, 422, "unknown"),
]


@pytest.mark.parametrize(
    ("change", "status", "named"), BAD_PLANS, ids=lambda value: str(value)[:40]
)
def test_a_plan_that_names_paths_or_code_is_refused(
    shared: Service, change: dict[str, object], status: int, named: str
) -> None:
    """The field is named, nothing is queued."""
    before = shared.client.jobs().last_event
    plan = {"workload": WORKLOAD, "specs": [SPEC], **change}
    answer = shared.ask("POST", "/v1/jobs", {"plan": plan})
    assert answer.status == status, answer.body
    assert named in str(answer.json["detail"])
    assert answer.json["next_step"]
    assert shared.client.jobs().last_event == before


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/v1/jobs/..%2f..%2fetc%2fpasswd",
            "/v1/jobs/../../etc/passwd",
            "/../page.js",
            "//etc/passwd",
        ),
        *("/v1/fingerprints/..%2f..", "/page/../settings.py", "/v1/jobs/%00", "/v1/jobs/%ff%fe"),
    ],
)
def test_paths_lead_nowhere_else(shared: Service, path: str) -> None:
    """Neither ``..`` nor anything encoded reaches a file."""
    answer = shared.ask("GET", path)
    assert answer.status in (404, 422)
    assert answer.headers["content-type"] == "application/problem+json"


def memory_of(service: Service) -> float:
    """Resident MB."""
    assert service.process is not None
    pages = int(Path("/proc", str(service.process.pid), "statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def test_a_body_of_100_mb_is_refused_and_not_kept(shared: Service) -> None:
    """By its length before a byte of it is read; without a length, once it has grown too large."""
    before = memory_of(shared)
    with closing(socket.create_connection(shared.address, timeout=20)) as link:
        link.sendall(head("Content-Length: 100000000"))
        assert b" 413 " in link.recv(4096).partition(b"\r\n")[0]
    with closing(socket.create_connection(shared.address, timeout=20)) as link:
        link.sendall(head("Transfer-Encoding: chunked"))
        chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        try:
            for _ in range(1600):
                link.sendall(chunk)
        except OSError:
            pass  # it has hung up
        else:
            link.settimeout(20)
            assert b" 413 " in link.recv(4096).partition(b"\r\n")[0]
    assert memory_of(shared) - before < 30
    assert shared.ask("GET", "/healthz").status == 200


def head(*lines: str) -> bytes:
    """The head of a submission."""
    return "\r\n".join(
        (
            "POST /v1/jobs HTTP/1.1",
            "Host: 127.0.0.1",
            "Content-Type: application/json",
            *lines,
            "",
            "",
        )
    ).encode()


def test_deep_and_strange_json_is_refused(shared: Service) -> None:
    """Nesting without end, numbers without end, what is no JSON, what is no text."""
    for body in (
        b"[" * 100_000,
        b'{"plan":' + b'{"a":' * 3000 + b"1" + b"}" * 3001,
        b'{"plan":{"workload":"w:x","specs":[{"dims":{"n":' + b"9" * 5000 + b"}}]}}",
        b'{"plan":{"workload":"\\ud800","specs":[{"dims":{"\\udfff":1}}]}}',
        b'{"plan":{"workload":"w:x","settings":{"x":NaN},"specs":[{}]}}',
        b'{"name":"\xff","plan":{}}',
        b"null",
        b"",
    ):
        with closing(http.client.HTTPConnection(*shared.address, timeout=20)) as link:
            link.request("POST", "/v1/jobs", body, {"Content-Type": "application/json"})
            answer = link.getresponse()
            assert answer.status in (400, 403, 422), body[:40]
            assert json.loads(answer.read())["next_step"]


def test_a_slow_client_is_let_go_and_holds_nobody_up(fresh: Template, tmp_path: Path) -> None:
    """Half a head, half a body, and a listener that reads nothing: each loses its connection alone."""
    service = Service(fresh, tmp_path, patience=0.6).start()
    try:
        with (
            closing(socket.create_connection(service.address)) as half_head,
            closing(socket.create_connection(service.address)) as half_body,
            closing(socket.create_connection(service.address)) as silent,
        ):
            half_head.sendall(b"GET /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nX-")
            half_body.sendall(head("Content-Length: 500") + b'{"plan"')
            silent.sendall(b"")
            assert service.ask("GET", "/v1/jobs").status == 200
            half_body.settimeout(20)
            assert b" 408 " in half_body.recv(4096).partition(b"\r\n")[0]
            for link in (half_head, silent):
                link.settimeout(20)
                assert link.recv(4096) == b""
        deaf(service)
        assert "Traceback" not in service.log
    finally:
        service.close()


def deaf(service: Service) -> None:
    """A listener that takes nothing loses its place."""
    with closing(socket.socket()) as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        link.connect(service.address)
        link.sendall(b"GET /v1/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        until(lambda: listeners(service) == 1)
        stop = threading.Event()
        noise = threading.Thread(target=make_noise, args=(service, stop))
        noise.start()
        try:
            until(lambda: listeners(service) == 0)
        finally:
            stop.set()
            noise.join()


def make_noise(service: Service, stop: threading.Event) -> None:
    """Events, more than sockets hold."""
    while not stop.is_set():
        service.wait(service.submit(*["quick"] * 400))


def listeners(service: Service) -> int:
    """How many clients listen."""
    return int(str(service.ask("GET", "/v1/about").json["listeners"]))


@pytest.mark.parametrize(
    "name", ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "a & b", "日本語 😀"]
)
def test_html_in_names_stays_text(shared: Service, name: str) -> None:
    """It comes back as JSON that no browser takes for a page."""
    job = shared.submit("quick", name=name)
    answer = shared.ask("GET", f"/v1/jobs/{job}")
    assert answer.json["name"] == name
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize("text", ["a\r\nSet-Cookie: x=1", "a\nb", "\x00", "\u2028", "x" * 201])
def test_names_that_would_break_a_header_or_a_line_are_refused(shared: Service, text: str) -> None:
    """Neither headers nor events can be forged."""
    answer = shared.ask("POST", "/v1/jobs", {"plan": plan_of_acts("quick"), "name": text})
    assert answer.status == 422
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize(
    "line",
    [
        "Last-Event-ID: 5\r\nX-Evil: 1",
        "Last-Event-ID: 5\nid: 9",
        "Authorization: Bearer a\rb",
        "Bad Name: x",
    ],
)
def test_headers_cannot_be_smuggled(shared: Service, line: str) -> None:
    """What is in the request never turns up among the headers of the answer."""
    with closing(socket.create_connection(shared.address, timeout=20)) as link:
        link.sendall(
            f"GET /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\n{line}\r\nConnection: close\r\n\r\n".encode()
        )
        answer = b""
        while part := link.recv(65536):
            answer += part
    assert b"X-Evil" not in answer
    assert answer.split(b" ")[1] in (b"200", b"400", b"401", b"422")


def test_every_answer_tells_browsers_to_be_careful(shared: Service) -> None:
    """Page, data and problems."""
    policy = shared.ask("GET", "/").headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for path in ("/", "/page.js", "/v1/jobs", "/v1/nothing", "/healthz"):
        headers = shared.ask("GET", path).headers
        assert headers["x-content-type-options"] == "nosniff", path
        assert "server" not in headers


def test_settings_that_would_let_everybody_in_are_refused(tmp_path: Path) -> None:
    """Beyond loopback a token is needed, one that nobody else can read or guess."""
    with pytest.raises(PlanError, match="there is no token"):
        Settings.load(None, {"host": "0.0.0.0"})
    path = Path(token_file(tmp_path))
    assert Settings.load(None, {"host": "0.0.0.0", "token_file": path}).read_token() == TOKEN
    path.chmod(0o644)
    with pytest.raises(UntrustedArtifact, match="can be read by others"):
        Settings.load(None, {"token_file": path}).read_token()
    path.write_text("short\n")
    path.chmod(0o600)
    with pytest.raises(PlanError, match="shorter than 16"):
        Settings.load(None, {"token_file": path}).read_token()


def test_settings_name_the_field_that_is_wrong(tmp_path: Path) -> None:
    """In a file, in its values, and in its format."""
    path = tmp_path / "settings.yaml"
    for text, named in (
        ("port: 99999", "port"),
        ("workloads: [nothing]", "module:attribute"),
        ("colour: red", "colour"),
        ("- a", "no mapping"),
        ("a: [", "cannot be read"),
    ):
        path.write_text(text)
        with pytest.raises(PlanError, match=named):
            Settings.load(path, {})
    path.write_text("workloads: ['a:b']\nport: 1")
    loaded = Settings.load(path, {"port": 2}, more_workloads=["c:d"])
    assert (loaded.port, loaded.workloads) == (2, ("a:b", "c:d"))


def test_time_passes_for_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """After twelve hours it is no longer good; with another token it never was."""
    from warmup.service.doors import SESSION_SECONDS, Doors

    doors = Doors(TOKEN, ())
    session = doors.new_session()
    assert doors.is_session(session)
    assert not Doors(TOKEN + "2", ()).is_session(session)
    later = time.time() + SESSION_SECONDS + 1
    monkeypatch.setattr(time, "time", lambda: later)
    assert not doors.is_session(session)
