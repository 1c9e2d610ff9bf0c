"""The page that `serve` shows: what it is sent with, and how it behaves in a real browser."""

from __future__ import annotations

import base64
import http.client
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import edgespec
from edgespec.api.limits import Limits
from edgespec.api.settings import Sampling
from edgespec.llama.projector import NoImageLibrary, load_library
from tests.browser import Browser, browsing, chromium
from tests.serving import CHAT, Running, serving, started
from tests.tiers import slow_except
from tests.tiny_images import png, write_seeing
from tests.waiting import PATIENCE_S

in_a_browser = pytest.mark.skipif(chromium() is None, reason="there is no Chromium here")

QUESTION = "Write the same list twice: one, two, three, one, two, three."
HOSTILE = """\
<script>window.hacked = 1</script> <img src=x onerror="window.hacked = 1">

[a](javascript:window.hacked=1) [b](https://example.com/?q=1) <https://example.com/c>

`<b>` **bold *and* <i>tagged</i>** ~~gone~~

```html
<script>window.hacked = 1</script>
```
"""


@pytest.fixture(scope="module")
def server(few_layers_path: Path, shared_cache: Path) -> Iterator[Running]:
    def load() -> edgespec.Engine:
        return edgespec.load(
            few_layers_path, draft="lookup", tree_budget=8, context=512, threads=1, exact=True
        )

    with serving(load, Limits(), max_tokens=40) as running:
        yield running


def request(
    server: Running, method: str, path: str, body: object = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    content = None if body is None else json.dumps(body)
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, content, {"Content-Type": "application/json", **fields})
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, data


def streamed(server: Running, **body: object) -> list[dict[str, object]]:
    asked = {"messages": [{"role": "user", "content": QUESTION}], "stream": True, "temperature": 0, **body}
    status, _, data = request(server, "POST", CHAT, asked)
    assert status == 200
    lines = [line.removeprefix("data: ") for line in data.decode().splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


# What it is sent with


def test_the_page_may_run_its_own_script_and_ask_its_own_server_alone(server: Running) -> None:
    status, headers, data = request(server, "GET", "/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "unsafe" not in policy
    assert policy.count("sha256-") == 2
    page = data.decode()
    for word in ("innerHTML", "insertAdjacentHTML", "document.write", "eval(", "http://", "@import"):
        # An address is allowed where it names the language of pictures.
        assert word not in page.replace("http://www.w3.org/2000/svg", ""), word


@pytest.mark.parametrize(
    ("origin", "status"),
    [("http://127.0.0.1:{port}", 200), ("https://evil.example", 403), ("null", 403), (None, 200)],
)
def test_pages_elsewhere_may_not_use_the_server(server: Running, origin: str | None, status: int) -> None:
    headers = {} if origin is None else {"Origin": origin.format(port=server.port)}
    found, answered, data = request(server, "GET", "/v1/models", **headers)
    assert found == status, data
    assert "access-control-allow-origin" not in answered


def test_speculation_is_reported_to_those_who_ask(server: Running) -> None:
    plain, told = streamed(server), streamed(server, speculation=True)
    assert not any("speculation" in event for event in plain)

    def text(events: list[dict[str, object]]) -> str:
        return "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])  # type: ignore[attr-defined]

    assert text(told) == text(plain)
    fields = [event["speculation"] for event in told if "speculation" in event]
    passes, whole = fields[:-1], fields[-1]
    trees = [one["tree"] for one in passes]  # type: ignore[index]
    said = ["".join([*(tree["tokens"][node] for node in tree["path"][1:]), tree["next"]]) for tree in trees]
    assert "".join(said).startswith(text(plain))
    assert sum(one["accepted"] + 1 for one in passes) >= 40  # type: ignore[index]
    assert whole["passes"] == len(passes)  # type: ignore[index]
    assert max(one["nodes"] for one in passes) > 1  # type: ignore[index]
    for one, tree in zip(passes, trees, strict=True):
        assert len(tree["tokens"]) == len(tree["parents"]) == len(tree["by"]) == one["nodes"]  # type: ignore[index]
        assert set(tree["by"][1:]) <= {"text", "recycled", "answers"}  # nothing else drafts here
        assert all(tree["parents"][node] in tree["path"] for node in tree["path"][1:])


# In a browser


@pytest.fixture(scope="module")
def browser(server: Running) -> Iterator[Browser]:
    with browsing() as browser:
        yield browser


def first_visit(browser: Browser, server: Running) -> Browser:
    """The page of a server, as somebody sees it who was never there."""
    origin = f"http://127.0.0.1:{server.port}"
    browser.go(f"{origin}/version")  # which keeps nothing
    browser.call("Storage.clearDataForOrigin", origin=origin, storageTypes="all")
    browser.run("sessionStorage.clear()")
    browser.resize(1200, 800)
    browser.go(f"{origin}/")
    browser.wait_for("models.length")
    browser.troubles.clear()
    browser.requested.clear()
    return browser


@pytest.fixture
def page(browser: Browser, server: Running) -> Browser:
    return first_visit(browser, server)


def visit_again(page: Browser, server: Running, how: str) -> None:
    page.go(f"http://127.0.0.1:{server.port}/?{how}")
    page.wait_for("models.length")


def ask(page: Browser, question: str = QUESTION) -> str:
    page.type(question)
    page.press("Enter")
    page.wait_for("!running && document.querySelector('.turn.answer')")
    return str(page.run("current.messages.at(-1).content"))


@in_a_browser
def test_an_answer_comes_with_its_trees_and_nothing_is_asked_of_others(
    page: Browser, server: Running
) -> None:
    answer = ask(page)
    status, told = server.post(CHAT, {"messages": [{"role": "user", "content": QUESTION}]})
    assert status == 200
    assert answer == told["choices"][0]["message"]["content"]
    assert page.run("document.querySelectorAll('#bars button').length === passes.length")
    drawn = "document.querySelectorAll('#picture .dot').length - 1"  # the last one is the model's own choice
    assert page.run(drawn) == page.run("passes.findLast((p) => p.nodes > 1).nodes")
    assert page.run("document.querySelector('#origin').textContent").startswith(answer)
    assert page.run("document.querySelectorAll('#origin span:not(.own)').length") > 0
    assert float(page.run("document.querySelector('#f-pass').textContent")) > 1
    assert page.troubles == []
    assert {url.split("/")[2] for url in page.requested if url.startswith("http")} == {
        f"127.0.0.1:{server.port}"
    }


SHOWN_VERSIONS = "[...document.querySelectorAll('.versions')].map((one) => one.ariaLabel)"
CONTENTS = "current.messages.map((message) => message.content)"


@in_a_browser
def test_every_version_of_a_question_and_an_answer_is_kept(page: Browser, server: Running) -> None:
    page.run("settings = { max_tokens: 4, temperature: 0 }")
    ask(page, "One two")
    ask(page, "Three four")
    first = page.run(CONTENTS)
    page.run("settings = { max_tokens: 8, temperature: 0 }")
    page.run("document.querySelector('.answer [aria-label=Retry]').click()")  # of the first answer
    page.wait_for("!running && current.messages[1]?.content")
    second = page.run(CONTENTS)
    assert len(second) == 2
    assert page.run(SHOWN_VERSIONS) == ["Version 2 / 2"]
    page.press("ArrowUp")
    page.run("document.activeElement.value = 'Five six'")
    page.press("Enter")
    page.wait_for("!running && current.messages[1]?.content")
    assert page.run(SHOWN_VERSIONS) == ["Version 2 / 2"]
    visit_again(page, server, "versions")
    page.run("document.querySelector('.question [aria-label=\"Previous version\"]').click()")
    assert page.run(CONTENTS) == second
    assert page.run("document.querySelector('#status').textContent") == "Version 1 of 2"
    page.run("document.querySelector('.answer .versions button').focus()")
    page.press("Enter")
    assert page.run(CONTENTS) == first
    assert page.run("document.activeElement.ariaLabel") == "Previous version"
    page.run("document.querySelector('.answer [aria-label=\"Next version\"]').click()")
    page.press(",", alt=True)
    assert page.run(CONTENTS) == first, "Alt and a comma turn to the version before"
    ask(page, "Seven")
    assert page.run(CONTENTS)[:4] == first
    assert page.run("everything(current).length") == 4 + 2 + 1 + 2
    assert page.troubles == []


@in_a_browser
def test_everything_can_be_done_by_keys(page: Browser) -> None:
    first = ask(page, "One two three one two")
    assert first
    page.press("ArrowUp")  # edit
    page.wait_for("document.activeElement.value === 'One two three one two'")
    page.run("document.activeElement.value = ''")
    page.type("Four")
    page.press("Enter")
    page.wait_for("!running")
    assert page.run("current.messages.map((m) => m.role).join()") == "user,assistant"
    assert page.run("current.messages[0].content") == "Four"
    page.press("r", alt=True)  # retry
    page.wait_for("!running")
    assert page.run("current.messages.length") == 2
    page.run("document.querySelector('#bars [tabindex=\"0\"]').focus()")
    page.press("ArrowLeft")
    at = page.run("[...document.querySelector('#bars').children].indexOf(document.activeElement)")
    assert page.run("document.querySelector('#pass-note').textContent").startswith(f"pass {at + 1} of ")
    page.press("t", alt=True)
    assert page.run("document.querySelector('#tree').inert")
    page.press("n", alt=True)
    assert page.run("current.messages.length") == 0
    assert page.run("document.activeElement.id") == "input"
    page.press("?", shift=True)
    assert page.run("document.querySelector('#keys').open")
    page.press("Escape")
    page.wait_for("!document.querySelector('#keys').open")
    page.press("ArrowDown", alt=True)
    assert page.run("current.messages[0].content") == "Four"
    page.run("document.activeElement.blur()")
    reached = set()
    for _ in range(30):
        page.press("Tab")
        reached.add(page.run("document.activeElement.id || document.activeElement.ariaLabel"))
    assert {
        "new",
        "open-settings",
        "theme",
        "toggle-tree",
        "log",
        "Edit",
        "Retry",
        "input",
        "send",
    } <= reached
    assert page.troubles == []


# A key that is sent from outside may come when the answer has already ended by itself.
STOP_SOON = """
{
  const push = Array.prototype.push;
  Array.prototype.push = function (...items) {
    const length = push.apply(this, items);
    if (this === passes && length >= 3) {
      Array.prototype.push = push;
      document.activeElement.dispatchEvent(new KeyboardEvent('keydown', { key: 'Escape', bubbles: true }));
    }
    return length;
  };
}
"""


@in_a_browser
def test_an_answer_can_be_stopped(page: Browser) -> None:
    page.run("settings = { max_tokens: 400 }")
    page.run(STOP_SOON)
    page.type("Tell me a very long story")
    page.press("Enter")
    page.wait_for("passes.length > 2")
    page.wait_for("!running && !document.querySelector('.busy')")
    page.wait_for("document.querySelector('.figures')?.textContent === 'stopped'")
    page.run("settings = {}")
    assert ask(page, "And then?")


MORE = "[...document.querySelectorAll('.answer .more')].filter((button) => button.checkVisibility())"


@in_a_browser
def test_an_answer_that_was_cut_or_stopped_can_be_continued(page: Browser, server: Running) -> None:
    page.run("settings = { max_tokens: 6, temperature: 0 }")
    cut = ask(page)
    assert page.run(f"{MORE}.length") == 1
    page.run(f"{MORE}[0].click()")
    page.wait_for("!running && !document.querySelector('.busy')")
    whole = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 12, "temperature": 0}
    expected = server.post(CHAT, whole)[1]["choices"][0]["message"]["content"]
    assert page.run("current.messages.map((m) => m.content)") == [QUESTION, expected]
    assert expected.startswith(cut)
    assert len(expected) > len(cut)

    page.run("settings = { max_tokens: 400, temperature: 0 }")
    page.run(STOP_SOON)
    page.run(f"{MORE}[0].click()")
    page.wait_for("!running && document.querySelector('.figures')?.textContent === 'stopped'")
    stopped = str(page.run("current.messages.at(-1).content"))
    page.run("settings = { max_tokens: 6, temperature: 0 }")
    page.run(f"{MORE}[0].click()")
    page.wait_for("!running && !document.querySelector('.busy')")
    assert str(page.run("current.messages.at(-1).content")).startswith(stopped)
    assert page.run("current.messages.length") == 2
    ask(page, "And then?")
    assert page.run(f"{MORE}.length") <= 1, "only the last answer can be continued"
    page.run("settings = {}")
    assert page.troubles == []


@in_a_browser
def test_passes_are_named_with_their_tokens(page: Browser) -> None:
    names = "[...document.querySelectorAll('#bars button')].map((bar) => bar.title)"
    page.run("settings = { max_tokens: 1 }")
    ask(page)
    assert page.run(names) == ["Pass 1: 1 token"]
    page.run("settings = {}")
    ask(page)
    tokens = page.run("passes.map((pass) => pass.accepted + 1)")
    assert max(tokens) > 1
    named = [f"Pass {n}: {count} token{'s' if count > 1 else ''}" for n, count in enumerate(tokens, start=1)]
    assert page.run(names) == named


@in_a_browser
def test_conversations_stay_in_the_browser(page: Browser, server: Running) -> None:
    first = ask(page, "First")
    page.press("n", alt=True)
    ask(page, "Second")
    visit_again(page, server, "later")
    titles = "[...document.querySelectorAll('#sessions .open')].map((b) => b.textContent).join()"
    assert page.run(titles) == "Second,First"
    page.run("document.querySelectorAll('#sessions .open')[1].click()")
    assert page.run("current.messages[1].content") == first
    assert page.run("document.querySelector('.answer .body').textContent.length") > 0
    page.run("document.querySelectorAll('#sessions .drop')[1].click()")
    assert page.run(titles) == "Second"
    page.run("document.querySelector('#toast button').click()")
    assert page.run(titles) == "Second,First"
    page.run("document.querySelectorAll('#sessions .open')[0].focus()")
    page.press("Delete")
    assert page.run(titles) == "First"
    page.press("z", alt=True)
    assert page.run(titles) == "Second,First"
    visit_again(page, server, "again")
    assert page.run(titles) == "Second,First"
    page.press("s", alt=True)
    page.type("firs")
    assert page.run(titles) == "First"
    assert page.run("document.querySelector('#status').textContent") == "1 conversation found"
    page.run("current.messages[1].content = 'A needle in it'; showSessions()")
    page.press("Escape")
    page.type("needle")
    assert page.run("document.querySelector('#sessions small').textContent") == "A needle in it"
    page.press("Tab")
    page.press("Enter")
    assert page.run("document.querySelector('.found .body').textContent")
    assert page.troubles == []


@in_a_browser
def test_what_is_exported_can_be_imported(page: Browser, server: Running) -> None:
    ask(page, "First")
    page.press("r", alt=True)
    page.wait_for("!running && current.messages.at(-1).content")
    kept = "JSON.stringify(sessions.map(({ messages, branches }) => [messages, branches]))"
    before, text = page.run(kept), page.run("exported()")
    ask(page, "Second")
    told = "document.querySelector('#toast span').textContent"
    bring = f"imported(new File([{json.dumps(text)}], 'a.json'))"
    page.run(bring)
    assert page.run("sessions.length") == 2, "it has changed here since"
    page.run(bring)
    assert page.run(told) == "0 of 1 conversations imported; the others are here already."
    first_visit(page, server)
    page.run(bring)
    assert page.run(kept) == before
    visit_again(page, server, "imported")
    assert page.run(kept) == before
    message = {"role": "user", "content": "A", "branches": [[{"role": "user"}], None]}
    nested = '{"role": "user", "content": "", "branches": [null, [' * 5000 + "]]}" * 5000
    for wrong in (
        "[]",
        "{",
        f'{{"sessions": [{{"id": "a", "title": "", "at": 1, "messages": [{nested}]}}]}}',
        {"sessions": [{}]},
        {"sessions": [{**json.loads(text)["sessions"][0], "messages": [message]}]},
    ):
        content = wrong if isinstance(wrong, str) else json.dumps(wrong)
        page.run(f"imported(new File([{json.dumps(content)}], 'b.json'))")
        assert page.run(told) == "b.json holds no exported conversations."
    assert page.run(kept) == before
    assert page.troubles == []


@in_a_browser
def test_a_conversation_of_another_tab_is_shown(page: Browser) -> None:
    page.run("""(async () => {
      const other = { id: "other", title: "Other", at: 1, messages: [] };
      await database.work("sessions", "readwrite", (kept) => kept.put(other, other.id));
      new BroadcastChannel("edgespec").postMessage("other"); })()""")
    page.wait_for("document.querySelector('#sessions .open')?.textContent === 'Other'")


LEAVE_SOON = """
{
  const push = Array.prototype.push;
  Array.prototype.push = function (...items) {
    const length = push.apply(this, items);
    if (this === passes && length >= 3) { Array.prototype.push = push; location.reload(); }
    return length;
  };
}
"""


@in_a_browser
def test_a_page_that_is_left_in_the_middle_of_an_answer_loses_nothing(page: Browser) -> None:
    page.run("store.write('settings', settings = { max_tokens: 400, temperature: 0 })")
    page.run(LEAVE_SOON + "; window.here = true")
    page.type("Tell me a very long story")
    page.press("Enter")
    page.type("And the next")  # which is not sent yet
    there = "!window.here && typeof models !== 'undefined' && models.length"
    page.wait_for(f"{there} && document.querySelector('.answer .body')?.textContent")
    assert page.run("document.querySelector('.figures').textContent") == "stopped"
    assert page.run("document.querySelector('#input').value") == "And the next"
    begun = page.run(CONTENTS)
    assert begun[0] == "Tell me a very long story"
    page.run("settings = { max_tokens: 4, temperature: 0 }")
    page.run(f"{MORE}[0].click()")
    page.wait_for("!running && !document.querySelector('.busy')")
    assert page.run(CONTENTS)[1].startswith(begun[1])


@in_a_browser
def test_what_does_not_fit_into_the_browser_stays_on_the_page(page: Browser, server: Running) -> None:
    origin = f"http://127.0.0.1:{server.port}"
    page.call("Storage.overrideQuotaForOrigin", origin=origin, quotaSize=1)
    try:
        answer = ask(page)
        told = "document.querySelector('#toast span').textContent"
        page.wait_for(f"{told}.startsWith('The browser\\'s storage is full')")
        assert page.run("document.querySelectorAll('.turn').length") == 2
        assert json.dumps(answer)[1:-1] in page.run("exported()")
    finally:
        page.call("Storage.overrideQuotaForOrigin", origin=origin)


FORM = "document.querySelector('#settings form').elements"


@in_a_browser
def test_all_sampling_settings_can_be_set(page: Browser) -> None:
    names = page.run("SAMPLING.map(([name]) => name)")
    aliases = {"max_completion_tokens", "num_predict", "n_predict"}
    aliases |= {"repeat_last_n", "nsigma", "banned_tokens"}
    assert set(names) == {*Sampling.__struct_fields__, "think", "logit_bias"} - aliases
    values = {
        **dict.fromkeys(names, "1"),
        "max_tokens": "4",
        "think": "off",
        "stop": "never\n\\n\\n",
        "banned_strings": "zebra",
        "stop_token_ids": "[1, 2]",
        "logit_bias": '{"3": -1}',
    }
    page.run("openSettings()")
    page.run(f"for (const [name, value] of Object.entries({json.dumps(values)})) {FORM}[name].value = value")
    page.run("document.querySelector('#settings .go').click()")
    page.wait_for("settings.logit_bias")
    assert page.run("[settings.stop, settings.stop_token_ids]") == [["never", "\n\n"], [1, 2]]
    assert ask(page)
    assert page.run("current.messages.at(-1).error === undefined")
    page.run("openSettings()")
    shown = page.run(f"Object.fromEntries(SAMPLING.map(([name]) => [name, {FORM}[name].value]))")
    assert shown == {**values, "stop_token_ids": "[1,2]", "logit_bias": '{"3":-1}'}
    page.run(f"{FORM}.logit_bias.value = '{{'; {FORM}.logit_bias.dispatchEvent(new Event('input'))")
    page.run("document.querySelector('#settings .go').click()")
    assert page.run("document.querySelector('#settings').open"), "what is no JSON is not saved"
    page.run("document.querySelector('#settings').close()")
    assert page.troubles == []


@in_a_browser
def test_everything_has_a_name_for_those_who_listen(page: Browser) -> None:
    ask(page)
    page.press("r", alt=True)
    page.wait_for("!running && document.querySelector('.versions')?.textContent")
    page.run("add([new File(['text'], 'a.txt')])")
    page.wait_for("added.length")
    for opened in ("document", "settings", "keys"):
        if opened != "document":
            page.run(f"document.querySelector('#{opened}').showModal()")
        nodes = page.call("Accessibility.getFullAXTree")["nodes"]
        roles = ("button", "textbox", "searchbox", "combobox", "spinbutton", "dialog", "article", "log")
        named = [node for node in nodes if not node["ignored"] and node["role"].get("value") in roles]
        assert [node for node in named if not node.get("name", {}).get("value")] == []
        assert {"document": "log", "settings": "spinbutton", "keys": "dialog"}[opened] in {
            node["role"]["value"] for node in named
        }
        if opened != "document":
            page.run(f"document.querySelector('#{opened}').close()")
    assert page.run("document.querySelector('#status').textContent").startswith("Answer: ")


@in_a_browser
def test_a_model_is_chosen_from_a_menu_where_there_are_several(
    browser: Browser, own_environment: None, short_path: Path, tmp_path: Path
) -> None:
    models = [tmp_path / "one.gguf", tmp_path / "two.gguf"]
    for path in models:
        path.hardlink_to(short_path)
    options = ("--draft", "none", "--context", "512", "--max-tokens", "8", "--memory", "400MiB")
    with started(*models, *options) as (several, _program):
        page = first_visit(browser, several)
        page.resize(390, 844)
        page.press("m", alt=True)
        assert page.run("document.activeElement.id") == "models"
        page.press("ArrowDown")
        assert page.run("[model, document.querySelector('#models').value]") == ["two", "two"]
        page.run("document.querySelector('#input').focus()")
        ask(page)
        assert page.run("document.querySelector('.figures').textContent").startswith("two · ")
        page.wait_for("models[1].loaded")
        shown = "[...document.querySelectorAll('#models option')].map((one) => one.textContent)"
        page.wait_for(f"{shown}[1] === 'two (in memory)'")
        visit_again(page, several, "later")
        assert page.run("model") == "two"
        assert page.run("document.documentElement.scrollWidth") <= 390
        assert page.troubles == []


@in_a_browser
def test_a_refusal_is_shown(page: Browser) -> None:
    page.type("word " * 600)
    page.press("Enter")
    notice = page.wait_for("document.querySelector('.notice')?.textContent")
    assert "the context holds 512 tokens" in notice
    assert ask(page, "Hi")  # what was refused is not sent again
    assert page.run("current.messages.at(-1).error === undefined")


@in_a_browser
def test_markdown_becomes_elements_and_hostile_text_stays_text(page: Browser) -> None:
    document = (
        "# One\n\nA *b* **c** `d`\ne\n\n1. x\n   - y\n2. z\n\n> q\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n---\n"
    )
    page.run("window.box = document.createElement('div')")
    page.run(f"show(box, {json.dumps(document)})")
    assert page.run("box.innerHTML") == (
        "<h1>One</h1><p>A <em>b</em> <strong>c</strong> <code>d</code><br>e</p>"
        "<ol><li>x<ul><li>y</li></ul></li><li>z</li></ol><blockquote><p>q</p></blockquote>"
        '<table><thead><tr><th scope="col">a</th><th scope="col">b</th></tr></thead>'
        "<tbody><tr><td>1</td><td>2</td></tr></tbody></table><hr>"
    )
    page.run(f"document.querySelector('#log').append(box); show(box, {json.dumps(HOSTILE)})")
    assert page.run("box.querySelectorAll('script, img, b, i').length") == 0
    assert page.run("[...box.querySelectorAll('a')].map((a) => a.href).join(' ')") == (
        "https://example.com/?q=1 https://example.com/c"
    )
    assert page.run("window.hacked === undefined")
    assert page.run("box.textContent").count("<script>") == 2
    assert "<https" not in page.run("box.textContent")
    # Piece by piece it becomes the same, and never fails on the way.
    for text in (document, HOSTILE):
        page.run(
            f"(() => {{ const t = {json.dumps(text)}, a = make('div'), b = make('div'); show(a, t);"
            " for (let n = 1; n <= t.length; n++) show(b, t.slice(0, n));"
            " if (a.innerHTML !== b.innerHTML) throw new Error(b.innerHTML); })()"
        )
    # What almost is Markdown takes no longer than other text.
    parts = [
        "`",
        "**a ",
        "~~a ",
        "[",
        "[a](b(",
        "<http://",
        "http://.",
        "> ",
        "- ",
        "-|",
        "# ",
        "~",
        "``` ",
        "\n",
    ]
    for start in ("", "# ", "`", "```", "|a\n|"):
        page.run(
            f"for (const part of {json.dumps(parts)})"
            f" show(make('div'), {json.dumps(start)} + part.repeat(20000) + 'x')"
        )
    assert page.troubles == []


def covered(page: Browser) -> float:
    """The share of the window that is covered by panels beside the conversation."""
    return float(
        page.run(
            """(() => {
              const ends = (box) => [Math.min(box.right, innerWidth) - Math.max(box.left, 0),
                                     Math.min(box.bottom, innerHeight) - Math.max(box.top, 0)];
              const area = (id) => {
                const node = document.getElementById(id);
                if (getComputedStyle(node).visibility === "hidden") return 0;
                const [width, height] = ends(node.getBoundingClientRect());
                return Math.max(width, 0) * Math.max(height, 0); };
              return (area("side") + area("tree")) / (innerWidth * innerHeight);
            })()"""
        )
    )


def is_free(page: Browser, name: str) -> bool:
    """True if the middle of an element can be seen and clicked."""
    return bool(
        page.run(
            f"""(() => {{
              const node = document.getElementById("{name}"), box = node.getBoundingClientRect();
              return node.contains(document.elementFromPoint(box.left + box.width / 2,
                                                             box.top + box.height / 2)); }})()"""
        )
    )


@in_a_browser
@pytest.mark.parametrize("width", [390, 500])
def test_a_small_window_begins_with_the_conversation_alone(
    page: Browser, server: Running, width: int
) -> None:
    """Whatever was open before, in a large window or in this one."""
    for before in (1200, width):
        page.resize(before, 844)
        page.run("setSide(true); setTree(true)")
        page.resize(width, 844)
        page.go(f"http://127.0.0.1:{server.port}/?{width}-{before}")
        page.wait_for("document.querySelector('#model').textContent === 'model'")
        assert covered(page) == 0
        assert is_free(page, "log")
        assert is_free(page, "input")
    page.run("document.querySelector('#toggle-tree').click()")
    assert 0 < covered(page) < 0.35  # there is no tree yet, so there is little to show
    ask(page)
    assert 0.5 < covered(page) < 0.7
    assert is_free(page, "log")
    assert is_free(page, "input")
    page.press("n", alt=True)
    assert covered(page) < 0.35
    assert page.troubles == []


@in_a_browser
def test_panels_do_not_stay_over_the_conversation_when_the_window_shrinks(page: Browser) -> None:
    ask(page)
    page.run("setSide(true); setTree(true); document.querySelector('#open-settings').focus()")
    for width in (500, 390):
        page.resize(width, 844)
        page.wait_for(f"innerWidth === {width} && !isOpen('side') && !isOpen('tree')")
        assert covered(page) == 0
        assert is_free(page, "log")
        assert is_free(page, "input")
    assert page.run("document.activeElement.id") == "input"  # not on something that is hidden
    page.run("document.querySelector('#toggle-tree').click()")
    page.resize(1200, 800)
    page.wait_for("innerWidth === 1200 && isOpen('side') && isOpen('tree')")
    page.run("setTree(false)")
    page.resize(390, 844)
    page.wait_for("!isOpen('side')")
    page.resize(1200, 800)
    page.wait_for("isOpen('side') && !isOpen('tree')")
    assert page.troubles == []


@in_a_browser
@pytest.mark.parametrize(
    ("width", "theme"),
    slow_except([(400, "dark"), (1200, "light")], itertools.product((400, 1200), ("light", "dark"))),
)
def test_it_fits_the_window_and_can_be_read(page: Browser, width: int, theme: str) -> None:
    page.resize(width, 800)
    page.run(f"setTheme('{theme}'); setSide(innerWidth > 1080); setTree(true)")
    ask(page)
    assert page.run("document.documentElement.scrollWidth") <= width
    assert page.run("document.querySelector('#send').getBoundingClientRect().bottom") <= 800
    assert page.run("document.querySelector('#picture').getBoundingClientRect().right") <= width
    # Web Content Accessibility Guidelines 2.2, 1.4.3: text has a contrast of at least 4.5 to 1.
    contrast = """((front, back) => {
      const light = (name) => {
        const probe = make("i");
        probe.style.color = `var(--${name})`;
        document.body.append(probe);
        const parts = getComputedStyle(probe).color.match(/\\d+/g).slice(0, 3).map((v) => v / 255);
        probe.remove();
        const [r, g, b] = parts.map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
      const [a, b] = [light(front), light(back)].sort((x, y) => y - x);
      return (a + 0.05) / (b + 0.05);
    })"""
    for front, back in [
        ("ink", "bg"),
        ("ink", "mine"),
        ("soft", "bg"),
        ("soft", "side"),
        ("soft", "card"),
        ("accent-ink", "accent"),
        ("bad", "bg"),
    ]:
        assert page.run(f"{contrast}('{front}', '{back}')") >= 4.5, (front, back)
    assert page.troubles == []


# Pictures

PICTURES = [png(), png(seed=2), png(60, 40, seed=3)]
FILES = """(...data) => data.map((text, at) => new File(
  [Uint8Array.from(atob(text), (c) => c.charCodeAt(0))], `${at}.png`, { type: 'image/png' }))"""


def files(*pictures: bytes) -> str:
    """An expression for the files in a browser."""
    return f"({FILES})(...{json.dumps([base64.b64encode(data).decode() for data in pictures])})"


def brought(kind: str, name: str, *pictures: bytes) -> str:
    """A script that has pictures pasted or dropped."""
    return f"""{{
      const bag = new DataTransfer();
      for (const file of {files(*pictures)}) bag.items.add(file);
      document.activeElement.dispatchEvent(new {kind}('{name}', {{
        clipboardData: bag, dataTransfer: bag, bubbles: true, cancelable: true }}));
    }}"""


@pytest.fixture(scope="module")
def seeing_server(tmp_path_factory: pytest.TempPathFactory, smol_path: Path) -> Iterator[Running]:
    try:
        load_library()
    except NoImageLibrary as missing:
        pytest.skip(f"llama.cpp was compiled without images: {missing}")
    path = write_seeing(tmp_path_factory.mktemp("seeing"), "idefics3", smol_path, damped=0.3)

    def load() -> edgespec.Engine:
        return edgespec.load(path, draft="none", context=512, threads=1, exact=True)

    with serving(load, Limits(), max_tokens=8) as running:
        yield running


@pytest.fixture
def seeing_page(browser: Browser, seeing_server: Running) -> Browser:
    return first_visit(browser, seeing_server)


TRAY = "document.querySelectorAll('#tray img').length"
SHOWN = "[...document.querySelectorAll('.question .pictures img')].filter((one) => one.naturalWidth).length"


@in_a_browser
def test_pictures_are_chosen_pasted_and_dropped(
    seeing_page: Browser, seeing_server: Running, tmp_path: Path
) -> None:
    page = seeing_page
    (tmp_path / "cat.png").write_bytes(PICTURES[0])
    page.call("DOM.enable")
    root = page.call("DOM.getDocument")["root"]["nodeId"]
    chooser = page.call("DOM.querySelector", nodeId=root, selector="#files")["nodeId"]
    page.call("DOM.setFileInputFiles", nodeId=chooser, files=[str(tmp_path / "cat.png")])
    page.wait_for(f"{TRAY} === 1")
    assert page.run("document.querySelector('#tray img').alt") == "cat.png"
    page.run(brought("ClipboardEvent", "paste", PICTURES[1]))
    page.wait_for(f"{TRAY} === 2")
    page.run(brought("DragEvent", "drop", PICTURES[2]))
    page.wait_for(f"{TRAY} === 3")
    page.run("document.querySelectorAll('#tray button')[2].click()")
    assert page.run(TRAY) == 2
    answer = ask(page, "one two")
    assert page.run(TRAY) == 0
    page.wait_for(f"{SHOWN} === 2")
    parts: list[object] = [
        {
            "type": "image_url",
            "image_url": {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}"},
        }
        for data in PICTURES[:2]
    ]
    told = [{"role": "user", "content": [*parts, {"type": "text", "text": "one two"}]}]
    status, expected = seeing_server.post(CHAT, {"messages": told})
    assert status == 200, expected
    assert answer == expected["choices"][0]["message"]["content"]
    again = ask(page, "three")  # the pictures are still part of the conversation
    told += [{"role": "assistant", "content": answer}, {"role": "user", "content": "three"}]
    assert again == seeing_server.post(CHAT, {"messages": told})[1]["choices"][0]["message"]["content"]
    assert page.troubles == []
    assert {url.split("/")[2] for url in page.requested if url.startswith("http")} == {
        f"127.0.0.1:{seeing_server.port}"
    }


@in_a_browser
def test_pictures_stay_with_their_conversation(seeing_page: Browser, seeing_server: Running) -> None:
    page = seeing_page
    page.run(brought("ClipboardEvent", "paste", PICTURES[0]))
    page.wait_for(f"{TRAY} === 1")
    page.press("Enter")  # without a word
    page.wait_for("!running && document.querySelector('.turn.answer')")
    answer = page.run("current.messages.at(-1).content")
    assert answer
    assert page.run("current.title") == "Pictures"
    page.run(  # conversations that cannot be read do not say which pictures they have
        "(async () => { const { work } = database; sessions = [];"
        " database.work = (name, ...rest) =>"
        "   name === 'sessions' ? Promise.reject(Error()) : work.call(database, name, ...rest);"
        " await start(); database.work = work; await new Promise((done) => setTimeout(done, 300)); })()"
    )
    page.wait_for("pictures.work('readonly', (kept) => kept.count()).then((n) => n === 1)")
    page.go(f"http://127.0.0.1:{seeing_server.port}/?later")
    page.wait_for(f"{SHOWN} === 1")
    page.press("r", alt=True)
    page.wait_for("!running && document.querySelector('.turn.answer .body').textContent")
    assert page.run("current.messages.at(-1).content") == answer
    page.press("ArrowUp")  # the question is edited, and its picture stays
    page.type("Two")
    page.press("Enter")
    page.wait_for("!running && current.messages.at(-1).content && current.messages[0].content === 'Two'")
    assert page.run("current.messages[0].images.length") == 1
    page.run("document.querySelector('#sessions .drop').click()")
    page.go(f"http://127.0.0.1:{seeing_server.port}/?last")
    page.wait_for("pictures.work('readonly', (kept) => kept.count()).then((n) => n === 0)")
    assert page.troubles == []


@in_a_browser
def test_what_the_server_cannot_read_is_drawn_anew(seeing_page: Browser) -> None:
    page = seeing_page
    drawing = (
        "data:image/svg+xml;base64,"
        + base64.b64encode(b'<svg xmlns="http://www.w3.org/2000/svg" width="4000" height="1000"/>').decode()
    )
    file = f"new File([atob({json.dumps(drawing)}.split(',')[1])], 'a.svg', {{ type: 'image/svg+xml' }})"
    page.run(f"add([{file}])")
    page.wait_for(f"{TRAY} === 1")
    assert page.run("added[0].url.startsWith('data:image/png;base64,')")
    size = page.run("((one) => [one.naturalWidth, one.naturalHeight])(document.querySelector('#tray img'))")
    assert size == [2048, 512]
    page.run("add([new File(['no picture'], 'b.png', { type: 'image/png' })])")
    page.wait_for("document.querySelector('#toast span').textContent === 'b.png cannot be read.'")
    assert page.run(TRAY) == 1


@in_a_browser
def test_text_files_are_part_of_the_question(page: Browser, server: Running) -> None:
    texts = {"a.py": "one = 1\n", "b.md": "```\ntwo\n```"}
    made = ", ".join(f"new File([{json.dumps(text)}], '{name}')" for name, text in texts.items())
    page.run(f"add([{made}])")
    page.wait_for("added.length === 2")
    answer = ask(page, "Explain")
    asked = "a.py\n```\none = 1\n\n```\n\nb.md\n````\n```\ntwo\n```\n````\n\nExplain"
    told = [{"role": "user", "content": asked}]
    status, expected = server.post(CHAT, {"messages": told})
    assert status == 200, expected
    assert answer == expected["choices"][0]["message"]["content"]
    visit_again(page, server, "later")
    names = "[...document.querySelectorAll('.question summary')].map((one) => one.textContent).join()"
    assert page.run(names) == "a.py,b.md"
    page.run("add([new File([new Uint8Array([255, 0])], 'c.bin')])")
    page.wait_for(
        "document.querySelector('#toast span').textContent === 'c.bin is not a text file in UTF-8.'"
    )
    assert page.run("added.length") == 0
    assert page.troubles == []


@in_a_browser
def test_pages_of_models_that_do_not_see_take_no_pictures(page: Browser) -> None:
    page.run(brought("ClipboardEvent", "paste", PICTURES[0]))
    page.wait_for("document.querySelector('#toast span').textContent === 'This model does not see pictures.'")
    assert page.run(TRAY) == 0
