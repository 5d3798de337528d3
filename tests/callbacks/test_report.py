import gzip
import json
import re
import shutil
from base64 import b64decode
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace

import pytest
from written_traces import write_run

from lit_rlsched.__main__ import main
from lit_rlsched.callbacks import RolloutLogger, SortedBatching
from lit_rlsched.callbacks.report import collect, run_data, write_report
from lit_rlsched.callbacks.report.collect import CUT, ENDED, ENDS, LATER
from lit_rlsched.scheduling.trace_files import Traces
from lit_rlsched.settings import UsageError

CHROMIUM = shutil.which("chromium")
HOSTILE = [
    "<script>window.ran = 1</script>",
    "</script><script>window.ran = 1</script>",
    "<img src=x onerror='window.ran = 1'>",
    "{{PLOTLY}} %{x} ${ran} \u2028 \ud83d\ude00 <b>bold</b>",
    "<a href='javascript:window.ran = 1'>here</a>",
    "\ud800 a lone surrogate \x00\x1b[31m",
]


def data_in(page):
    packed = re.search(r'id="data">([^<]*)<', page.read_text(encoding="utf-8"))[1]
    return json.loads(gzip.decompress(b64decode(packed)))


def test_a_run_ends_with_its_report(fit, tmp_path):
    callbacks = [RolloutLogger(), SortedBatching(mode="partial")]
    fit(callbacks=callbacks, trainer={"max_epochs": 3, "default_root_dir": tmp_path})
    (run,) = data_in(tmp_path / "report.html")["runs"]
    traces = Traces(tmp_path)
    spans, completions = traces.rows("spans"), traces.rows("completions")
    assert [of["round"] for of in run["timelines"]] == run["curves"]["round"] == [1, 2, 3]
    ended = {(r["round"], r["request"]): r["fate"] for r in completions}
    for of in run["timelines"]:
        own = [row for row in spans if row["round"] == of["round"]]
        assert sum(of["tokens"]) == sum(row["tokens"] for row in own)
        assert of["every"] == 1 and len(of["slot"]) == len(own)
        assert {lane["lane"] for lane in of["lanes"]} == {"trainer", "engine 0"}
        for lane in of["lanes"]:
            assert all(a <= b for a, b in pairwise(lane["start"]))
        for prompt, index, end, *_ in of["requests"]:
            fate = ended.get((of["round"], f"{of['prompts'][prompt]}/{index}"))
            assert ENDS[end] in (
                {"stop": ("ended by itself",), "length": ("cut at the limit",)}.get(fate, ENDS[3:])
            )
    groups = {(row["round"], row["request"].rpartition("/")[0]) for row in completions}
    counts = [of for kind, of in run["groups"].items() if kind != "round"]
    assert sum(map(sum, counts)) == len(groups)
    assert run["schedules"] and {"no callback", "StreamedTraining()"} <= {
        name for name, *_ in run["schedules"]
    }
    assert run["completions"]["rows"] and run["completions"]["of"] == 3


def test_it_is_refreshed_while_the_run_goes_on(fit, tmp_path):
    seen = []

    class Looks(RolloutLogger):
        def on_round_end(self, trainer, pl_module, round):
            super().on_round_end(trainer, pl_module, round)
            page = tmp_path / "report.html"
            seen.append(page.exists() and data_in(page))

    trainer = {"max_epochs": 3, "default_root_dir": tmp_path}
    fit(callbacks=[Looks(pictures_every_n_rounds=2)], trainer=trainer)
    assert seen[0] is False and seen[1] == seen[2]
    assert seen[1]["made"].endswith("while the run went on.")
    (run,) = seen[1]["runs"]
    assert run["curves"]["round"] == [1, 2] and run["curves"]["reward"]
    assert not data_in(tmp_path / "report.html")["made"].endswith("while the run went on.")


def test_without_traces_there_is_no_report(fit, tmp_path):
    fit(
        callbacks=[RolloutLogger(save_trace=False)],
        trainer={"max_epochs": 1, "default_root_dir": tmp_path},
    )
    assert not (tmp_path / "report.html").exists()


def test_groups_that_teach_nothing_are_told_apart(tmp_path, monkeypatch):
    rows = {
        "mixed": [(1.0, 1), (0.0, 2)],
        "right": [(1.0, 3), (1.0, 4)],
        "wrong": [(0.0, 5), (0.0, 6)],
        "same": [(0.0, 7), (0.0, 7)],
        "half": [(0.5, 8), (0.5, 9)],
        "one": [(1.0, 10)],
    }
    table = [
        {"round": 2, "request": f"{name}/{i}", "fate": "stop", "reward": reward, "text": text}
        | {"advantage": 0.0, "drawn": 3}
        for name, of in rows.items()
        for i, (reward, text) in enumerate(of)
    ]
    table.append({**table[1], "fate": "nonfinite_logprob", "request": "right/2", "reward": 0.0})
    import pyarrow as pa

    traces = SimpleNamespace(table=lambda name: pa.Table.from_pylist(table))
    counts = collect._groups(collect._completions(traces))
    assert counts == {
        "round": [2],
        "several rewards": [1],
        "all right": [2],
        "all wrong": [1],
        "one text": [1],
        "one other reward": [1],
    }


def test_what_a_request_did_in_a_round():
    import numpy as np

    spans = {
        "request": np.array(["a@0/0", "a@0/1", "a@0/0", "b@0/0"], object),
        "slot": np.array([0, 1, 0, 1]),
        "start": np.array([0.0, 0.0, 2.0, 3.0]),
        "end": np.array([1.0, 3.0, 4.0, 4.0]),
        "tokens": np.array([5, 6, 7, 8]),
    }
    completions = {
        "request": np.array(["a@0/0", "a@0/1"], object),
        "drawn": np.array([15, 6]),
        "fate": np.array(["stop", "length"], object),
        "reward": np.array([1.0, float("nan")]),
        "waited": np.array([0, 0]),
    }
    of = collect._timeline(spans, completions, {"a@0/0": 1, "a@0/1": 1, "b@0/0": 2}, 1)
    assert of["requests"] == [
        [0, 0, ENDED, 3, 1.0, 0],
        [0, 1, CUT, 0, None, 0],
        [1, 0, LATER, 0, None, 0],
    ]
    assert of["request"] == [0, 1, 0, 2] and of["start"] == [0, 0, 2000, 3000]


@pytest.mark.slow
def test_a_thousand_rounds_take_ten_megabytes_at_most(tmp_path):
    write_run(tmp_path, 1000, prompts=16, generations=8, texts=16, text="x", random_text=2000)
    page = write_report(tmp_path / "r.html", [run_data(tmp_path)])
    assert page.stat().st_size < 10e6
    (run,) = data_in(page)["runs"]
    assert len(run["curves"]["round"]) == 1000
    shown = [of["round"] for of in run["timelines"]]
    assert shown[-1] == 1000 and len(shown) > 100
    texts = {
        row[run["completions"]["columns"].index("round")] for row in run["completions"]["rows"]
    }
    assert max(texts) == 1000 and len(texts) == run["completions"]["rounds"] > 20


def test_a_file_for_perfetto(tmp_path, capsys):
    run = write_run(tmp_path / "run", 3)
    trace = tmp_path / "trace.json.gz"
    main(["report", str(run), "--perfetto", str(trace)])
    assert str(run / "report.html") in capsys.readouterr().out
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    bars = [e for e in events if e["ph"] == "X" and e["pid"] == 2]
    assert len(bars) == len(Traces(run).rows("spans"))
    for slot in {e["tid"] for e in bars}:  # bars of a slot do not overlap
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in bars if e["tid"] == slot)
        assert all(a[1] <= b[0] for a, b in pairwise(own))
    counts = [e["args"]["completions"] for e in events if e["ph"] == "C"]
    assert min(counts) == 0 and max(counts) == 4
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {"trainer", "engine 0"}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, []),
        ({"reward_funcs": ["other"]}, ["different reward functions: their rewards"]),
        ({"model": "other", "tokenizer": "t"}, ["different models and tokenizers: lengths"]),
    ],
)
def test_runs_of_two_tasks_are_not_compared_in_silence(tmp_path, more, said):
    runs = [write_run(tmp_path / "a", 2), write_run(tmp_path / "b", 3, **more)]
    main(["report", *map(str, runs), "--out", str(tmp_path / "both.html")])
    notes = data_in(tmp_path / "both.html")["notes"]
    assert len(notes) == len(said) and all(map(str.__contains__, notes, said))


def test_what_cannot_be_shown_is_said_in_a_sentence(tmp_path):
    run = write_run(tmp_path / "run", 2)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="holds no traces"):
        run_data(tmp_path / "empty")
    path = next((run / "traces" / "spans").glob("*.parquet"))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UsageError, match="cannot be read"):
        run_data(run)
    path.unlink()
    with (run / "completions.jsonl").open("a") as file:
        file.write('{"round": 3, "prompt": "cut by a k')
    of = run_data(run)
    assert of["timelines"] == [] and of["completions"]["of"] == 2
    shutil.rmtree(run / "traces" / "rounds")
    with pytest.raises(UsageError, match="no whole round yet"):
        run_data(run)


@contextmanager
def opened(page, expected="", **context):
    """The page in headless Chromium; nothing else may be printed, and nothing sent."""
    from playwright.sync_api import sync_playwright

    said, sent = [], []
    with sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_context(**context).new_page()
        tab.on("console", lambda message: said.append(message.text))
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.on("request", lambda request: sent.append(request.url))
        tab.goto(page.as_uri())
        tab.wait_for_selector("body[data-ready]")
        yield tab
        assert [text for text in said if not (expected and re.search(expected, text))] == []
        assert {url.partition("#")[0] for url in sent} == {page.as_uri()}
        browser.close()


in_a_browser = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no `chromium` (Debian's package)"),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    runs = [write_run(folder / "one", 5), write_run(folder / "two", 7, seed=1, texts=16)]
    main(["report", *map(str, runs), "--out", str(folder / "both.html")])
    return folder / "both.html"


class TestInABrowser:
    pytestmark = in_a_browser

    def test_one_can_click_through_it(self, page):
        _, two = data_in(page)["runs"]
        with opened(page, viewport={"width": 1400, "height": 900}) as tab:
            assert tab.title() == "Report of one, two"
            round_shown = tab.locator("#round-shown")
            assert round_shown.inner_text() == "Round 5"
            tab.get_by_role("button", name="Previous round").click()
            assert round_shown.inner_text() == "Round 4"
            tab.get_by_role("slider").focus()
            tab.keyboard.press("Home")
            assert round_shown.inner_text() == "Round 1"
            tab.select_option("#run", label="two")
            assert round_shown.inner_text() == "Round 7"
            # a bar of the timeline says which completion it is
            tab.locator("#timeline .barlayer .point path").first.click(force=True)
            assert re.match(r"prompt p7\.\d@0, completion \d", tab.inner_text("#span-told"))
            # each chart has a table of the same numbers
            tab.get_by_text("What each slot decoded as a table").click()
            rows = tab.locator("#timeline tbody tr")
            assert rows.count() == len(two["timelines"][-1]["slot"])
            tab.get_by_text("Mean reward as a table").click()
            assert tab.locator("#learning tbody tr").count() == 5 + 7
            # zoom with a button: the axis changes, and `All` brings it back
            ranges = "e => e.layout.xaxis.range"
            chart = tab.locator("#timeline .chart")
            before = chart.evaluate(ranges)
            tab.get_by_role("button", name="Zoom in: What each slot decoded").click()
            inside = chart.evaluate(ranges)
            assert before[0] < inside[0] < inside[1] < before[1]
            tab.get_by_role("button", name="Show all: What each slot decoded").click()
            assert chart.evaluate(ranges) == pytest.approx(before)
            # completions: sorted by a column, and searched
            table = tab.locator("#completions table")
            columns = two["completions"]["columns"]
            place = columns.index("completion_length")
            lengths = sorted(row[place] for row in two["completions"]["rows"])
            cell = table.locator(f"tbody tr:first-child td:nth-child({place + 1})")
            head = table.get_by_role("button", name="completion_length")
            head.click()
            assert cell.inner_text() == str(lengths[0])
            head.click()
            assert cell.inner_text() == str(lengths[-1])
            text = two["completions"]["rows"][3][columns.index("completion")].strip()
            tab.get_by_label("Search").fill(text.upper())
            assert table.locator("tbody tr").count() == 1 and text in table.inner_text()
            tab.select_option("#axis", "minutes")
            assert "minutes" in tab.locator("#learning .xtitle").first.text_content()

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    @pytest.mark.parametrize("width", [1400, 390])
    def test_everyone_can_read_it(self, page, scheme, width):
        from axe_playwright_python.sync_playwright import Axe

        size = {"width": width, "height": 900}
        with opened(page, viewport=size, color_scheme=scheme) as tab:
            tab.keyboard.press("Tab")
            tab.keyboard.press("Enter")
            assert tab.evaluate("location.hash") == "#main"
            for summary in tab.locator("summary").all():
                summary.click()
            found = Axe().run(tab).response["violations"]
            assert [(v["id"], v["nodes"][0]["html"]) for v in found] == []
            assert tab.evaluate("document.documentElement.scrollWidth") <= width

    def test_text_of_models_runs_nothing(self, tmp_path):
        run = tmp_path / "<script>window.ran = 1<"
        write_run(run, 2, reward_funcs=[HOSTILE[0]], model=HOSTILE[1])
        rows = [
            {"round": 2, "prompt": text, "completion": text, text: 1.0, "advantage": 0.0}
            for text in HOSTILE
        ]
        with (run / "completions.jsonl").open("w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        traces = run / "traces" / "spans" / "000001-000002.parquet"
        hostile_requests(traces)
        report = write_report(tmp_path / "r.html", [run_data(run)])
        blocked = "inline script violates the following Content Security Policy"
        with opened(report, expected=blocked) as tab:
            tab.get_by_text("What each slot decoded as a table").click()
            tab.locator("#timeline .barlayer .point path").first.hover(force=True)
            tab.wait_for_timeout(300)
            shown = tab.inner_text("#completions")
            assert HOSTILE[0] in shown and HOSTILE[2] in shown and "here" in shown
            assert tab.locator("main script, main img, main b, main a[href^=java]").count() == 0
            assert tab.evaluate("window.ran") is None
            # the policy holds where escaping would fail
            tab.evaluate(
                "document.body.append(Object.assign(document.createElement('script'), "
                "{textContent: 'window.ran = 1'}))"
            )
            assert tab.evaluate("window.ran") is None
            tab.wait_for_timeout(100)


def hostile_requests(path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = pq.ParquetFile(path).read().to_pylist()
    for row in rows:
        row["request"] = f"<img src=x onerror='window.ran = 1'>{row['request']}"
    pq.write_table(pa.Table.from_pylist(rows), path)
