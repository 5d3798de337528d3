import gzip
import json
import math
import re
import shutil
from base64 import b64decode
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from written_traces import write_run

from lit_rlsched.__main__ import main
from lit_rlsched.callbacks import MicroGroupSampling, RolloutLogger, SortedBatching
from lit_rlsched.callbacks.report import collect, timelines
from lit_rlsched.callbacks.report import page as page_module
from lit_rlsched.callbacks.report.collect import run_data
from lit_rlsched.callbacks.report.page import write_report
from lit_rlsched.callbacks.report.timelines import CUT, ENDED, LATER, OPEN, UNUSED, kept
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
    callbacks = [RolloutLogger(), MicroGroupSampling(slots=6), SortedBatching(mode="partial")]
    fit(callbacks=callbacks, trainer={"max_epochs": 3, "default_root_dir": tmp_path})
    (run,) = data_in(tmp_path / "report.html")["runs"]
    traces = Traces(tmp_path)
    spans, completions = traces.rows("spans"), traces.rows("completions")
    assert [of["round"] for of in run["timelines"]] == run["curves"]["round"] == [1, 2, 3]
    fates = {r["request"]: r["fate"] for r in completions}
    rounds_of = {}
    for row in spans:
        rounds_of.setdefault(row["request"], []).append(row["round"])
    ends = set()
    for of in run["timelines"]:
        own = [row for row in spans if row["round"] == of["round"]]
        assert sum(of["tokens"]) == sum(row["tokens"] for row in own)
        assert of["every"] == 1 and len(of["slot"]) == len(own)
        assert {lane["lane"] for lane in of["lanes"]} == {"trainer", "engine 0"}
        for lane in of["lanes"]:
            assert all(a <= b for a, b in pairwise(lane["start"]))
        for prompt, index, end, *_ in of["requests"]:
            request = f"{of['prompts'][prompt]}/{index}"
            if max(rounds_of[request]) > of["round"]:
                wanted = LATER
            elif request in fates:
                wanted = {"stop": ENDED, "length": CUT}[fates[request]]
            else:
                wanted = OPEN if of["round"] == 3 else UNUSED
            assert end == wanted
            ends.add(end)
    assert {LATER, OPEN} <= ends and ends & {ENDED, CUT}
    groups = {(row["round"], row["request"].rpartition("/")[0]) for row in completions}
    counts = [of for kind, of in run["groups"].items() if kind != "round"]
    assert sum(map(sum, counts)) == len(groups)
    names = [name for name, *_ in run["schedules"]]
    assert {"no callback", "StreamedTraining()"} <= {*names}
    own = r"SortedBatching\(mode='partial'\)  \(this run: [\d.]+ s measured\)"
    assert [name for name in names if re.fullmatch(own, name)]
    assert run["completions"]["rows"] and run["completions"]["of"] == 3


def test_it_is_refreshed_while_the_run_goes_on(fit, tmp_path):
    seen = []

    class Looks(RolloutLogger):
        def on_round_end(self, trainer, pl_module, round):
            super().on_round_end(trainer, pl_module, round)
            page = tmp_path / "report.html"
            seen.append(page.exists() and data_in(page))

    trainer = {"max_epochs": 3, "default_root_dir": tmp_path}
    fit(callbacks=[Looks(report_every_n_rounds=2)], trainer=trainer)
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


@pytest.mark.parametrize(
    ("rewards", "texts", "kind"),
    [
        ((1, 0), (1, 2), "several rewards"),
        ((1, 1), (1, 2), "all right"),
        ((0, 0), (1, 2), "all wrong"),
        ((0, 0), (3, 3), "one text"),
        ((1, 1), (3, 3), "one text"),
        ((0, 0), (None, None), "all wrong"),  # nothing is known of the texts
        ((0.5, 0.5), (1, 2), "one other reward"),
        ((1,), (1,), "all right"),
        ((0, 0, math.nan), (1, 2, 3), "all wrong"),
        ((None, math.nan), (1, 2), "no reward"),
    ],
)
def test_groups_that_teach_nothing_are_told_apart(rewards, texts, kind):
    group = [{"reward": r, "text": t} for r, t in zip(rewards, texts, strict=True)]
    assert collect._kind(group, best=1.0, worst=0.0) == kind


@pytest.mark.parametrize(("reward", "kind"), [(0.0, "all wrong"), (1.0, "all right")])
def test_rewards_that_are_all_the_same_in_the_whole_run(tmp_path, reward, kind):
    run = run_data(write_run(tmp_path, 2, reward=reward))
    assert run["groups"][kind] == [4, 4]
    assert run["verdict"] == "Reward 0.50 → 0.50 in 2 rounds. 25% of the slot-time was idle."


def test_what_a_request_did_in_a_round():
    """A completion paused, one was cut, and one goes on; all slots, and every second one."""
    spans = {
        "request": ["a@0/0", "a@0/1", "a@0/0", "b@0/0", "c@0/0"],
        "slot": [0, 1, 1, 1, 0],
        "start": [0.0, 0.0, 3.0, 4.0, 2.0],
        "end": [1.0, 3.0, 4.0, 5.0, 5.0],
        "tokens": [5, 6, 7, 8, 9],
    }
    done = {"waited": 0, "deferred": 1, "attempts": 0}
    fates = {
        "a@0/0": (1, {"drawn": 15, "fate": "stop", "reward": 1.0, **done}),
        "a@0/1": (1, {"drawn": 6, "fate": "length", "reward": math.nan, **done}),
    }
    last = {"a@0/0": 1, "a@0/1": 1, "b@0/0": 2, "c@0/0": 1}
    part = pa.table(spans)
    of = timelines._timeline(part, 1, fates, last, newest=False)
    assert of["prompts"] == ["a@0", "c@0", "b@0"]
    assert of["requests"] == [
        [0, "0", ENDED, 3, 1.0, 0, 1, 0],
        [0, "1", CUT, 0, None, 0, 1, 0],
        [1, "0", UNUSED, 0, None, 0, 0, 0],
        [2, "0", LATER, 0, None, 0, 0, 0],
    ]
    assert of["start"] == [0, 0, 2000, 3000, 4000] and of["slot"] == [0, 1, 0, 1, 1]
    assert of["first"] == [1, 1, 1, 0, 1] and of["last"] == [0, 1, 1, 1, 1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timelines, "MOST_SPANS_OF_ROUND", 3)
        half = timelines._timeline(part, 1, fates, last, newest=True)
    assert half["every"] == 2 and half["slots"] == 2 and half["slot"] == [0, 0]
    # its second time in a slot is hidden, and counts
    assert half["requests"][0] == of["requests"][0] and half["last"] == [0, 1]
    assert half["requests"][1][2] == OPEN


@given(st.dictionaries(st.integers(1, 2000), st.integers(0, 50), max_size=60), st.integers(0, 500))
def test_rounds_are_thinned_evenly(sizes, most):
    found = kept(sizes, most)
    if not sizes:
        assert found == []
        return
    assert found == sorted(found) and found[-1] == max(sizes)
    assert len(found) == 1 or sum(sizes[n] for n in found) <= most
    if sum(sizes.values()) <= most:
        assert found == sorted(sizes)


def test_a_page_that_cannot_be_made_ends_no_run(fit, tmp_path, monkeypatch):
    def fails(*_, **__):
        raise KeyError("a fault")

    monkeypatch.setattr("lit_rlsched.callbacks.report.collect.run_data", fails)
    trainer = {"max_epochs": 2, "default_root_dir": tmp_path}
    with pytest.warns(UserWarning, match="`.*report.html` was not written: KeyError: 'a fault'"):
        fit(callbacks=[RolloutLogger(report_every_n_rounds=1)], trainer=trainer)
    assert len(Traces(tmp_path).rows("rounds")) == 2


@pytest.mark.slow
def test_a_thousand_rounds_take_ten_megabytes_at_most(tmp_path):
    chinese = (0x4E00, 0x9FFF)
    write_run(tmp_path, 1000, prompts=16, texts=16, random_text=700, letters=chinese)
    page = write_report(tmp_path / "r.html", [run_data(tmp_path)])
    assert page.stat().st_size < 10e6
    (run,) = data_in(page)["runs"]
    assert len(run["curves"]["round"]) == 1000
    shown = [of["round"] for of in run["timelines"]]
    assert shown[-1] == 1000 and len(shown) >= 100
    of = run["completions"]
    numbers = {row[of["columns"].index("round")] for row in of["rows"]}
    assert max(numbers) == 1000 and len(numbers) == of["rounds"] > 20


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, []),
        ({"reward_funcs": ["other"]}, ["different reward functions: their rewards"]),
        ({"train_data": "MATH"}, ["different training data: their rewards"]),
        ({"model": "other", "tokenizer": "t"}, ["different models and tokenizers: their"]),
    ],
)
def test_runs_of_two_tasks_are_not_compared_in_silence(tmp_path, more, said):
    runs = [write_run(tmp_path / "a", 2), write_run(tmp_path / "b", 3, **more)]
    main(["report", *map(str, runs), "--out", str(tmp_path / "both.html")])
    notes = data_in(tmp_path / "both.html")["notes"]
    assert len(notes) == len(said) and all(map(str.__contains__, notes, said))


def test_two_runs_of_one_name(tmp_path):
    runs = [write_run(tmp_path / of / "run", 2) for of in "ab"]
    page = write_report(tmp_path / "both.html", [run_data(run) for run in runs])
    assert [run["name"] for run in data_in(page)["runs"]] == [*map(str, runs)]


def test_what_cannot_be_shown_is_said_in_a_sentence(tmp_path):
    run = write_run(tmp_path / "run", 3)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="holds no traces"):
        run_data(tmp_path / "empty")
    path = next((run / "traces" / "spans").glob("*.parquet"))
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    with pytest.raises(UsageError, match="cannot be read"):
        run_data(run)
    path.write_bytes(whole)
    pq.write_table(pq.ParquetFile(path).read().drop_columns("slot"), path)
    with pytest.raises(UsageError, match=r"spans.* has no column `slot`"):
        run_data(run)
    path.unlink()
    odd = ["[" * 100_000, '{"round": 1e999}', '{"round": "a"}', "[]", "7", '{"a": ' * 500]
    odd += ['{"round": 2, "completion": ' + "[" * 900 + "]" * 900 + "}", "1" * 5000, "\x00"]
    with (run / "completions.jsonl").open("a") as file:
        file.writelines(f"{line}\n" for line in odd)
        file.write('{"round": 3, "prompt": "cut by a k')
    of = run_data(run)
    assert of["timelines"] == [] and of["completions"]["of"] == 3
    assert of["notes"] == ["`completions.jsonl`: 10 of 22 lines cannot be read."]
    for name in ("completions", "intervals"):
        for path in (run / "traces" / name).glob("*.parquet"):
            path.unlink()
    assert run_data(run)["groups"] == {} == run_data(run)["lanes"]
    shutil.rmtree(run / "traces" / "rounds")
    with pytest.raises(UsageError, match="no whole round yet"):
        run_data(run)


def test_traces_that_were_shortened_or_are_of_a_simulated_engine_say_so(tmp_path):
    run = write_run(tmp_path, 4, clock=False)
    path = next((run / "traces" / "spans").glob("*.parquet"))
    pq.write_table(pq.ParquetFile(path).read().filter(pc.field("round") > 2), path)
    of = run_data(run)
    assert of["notes"][0].startswith("Of spans the traces have rounds from 3 on")
    assert "clock is simulated" in of["notes"][1]
    assert [line["round"] for line in of["timelines"]] == [3, 4]


def test_odd_values_of_reward_functions(tmp_path):
    run = write_run(tmp_path, 1)
    odd = {"big": 10**400, "list": [1, {"a": "b"}], "flag": True, "none": None, "nan": math.nan}
    row = {"round": 1, "prompt": [{"role": "user", "content": "hi"}], "completion": "x", **odd}
    (run / "completions.jsonl").write_text(json.dumps(row) + "\n")
    of = run_data(run)["completions"]
    shown = dict(zip(of["columns"], of["rows"][0], strict=True))
    assert shown["prompt"] == "user: hi" and shown["list"] == '[1, {"a": "b"}]'
    assert shown["big"].startswith("1000") and shown["flag"] is True and shown["nan"] is None


def test_a_row_of_metrics_that_a_kill_has_cut(tmp_path):
    run = write_run(tmp_path, 2)
    folder = run / "metrics" / "version_0"
    folder.mkdir(parents=True)
    text = "rollout/round,time/total,reward\n1,5.0,0.25\n2,6.0,1e-"
    (folder / "metrics.csv").write_text(text)
    assert run_data(run)["curves"]["reward"] == [0.25, 0.5]  # the second one is of the traces


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    parts = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), parts, strict=True))


@pytest.mark.parametrize(("name", "place"), [("LIGHT", 0), ("DARK", 1)])
def test_charts_have_the_contrast_that_wcag_asks_for(name, place):
    """3 to 1 for graphics, 4.5 to 1 for text: the checker in the browser sees no graphics."""
    folder = Path(page_module.__file__).parent
    colours = re.search(rf"const {name} = \[(.*)\]", (folder / "page.js").read_text())[1]
    style = (folder / "page.css").read_text()

    def contrast(one, other):
        low, high = sorted(map(luminance, (one, other)))
        return (high + 0.05) / (low + 0.05)

    paper = {n: re.findall(rf"--{n}: (#\w+)", style)[place] for n in ("panel", "paper", "soft")}
    for colour in re.findall(r"#\w+", colours):
        assert contrast(colour, paper["panel"]) >= 3
        assert contrast(colour, "#000000" if name == "DARK" else "#ffffff") >= 3  # the marks
    assert contrast(paper["soft"], paper["panel"]) >= 4.5


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
        yield (tab, said) if expected else tab
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
            rows.first.wait_for()
            assert rows.count() == len(two["timelines"][-1]["slot"])
            tab.get_by_text("Mean reward as a table").click()
            tab.locator("#learning tbody tr").first.wait_for()
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

    @pytest.mark.parametrize(("scheme", "width"), [("light", 390), ("dark", 1400)])
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
        with opened(report, expected=blocked) as (tab, said):
            tab.get_by_text("What each slot decoded as a table").click()
            tab.locator("#timeline .barlayer .point path").first.hover(force=True)
            tab.wait_for_timeout(300)
            shown = tab.inner_text("#completions")
            assert HOSTILE[0] in shown and HOSTILE[2] in shown and "here" in shown
            assert tab.locator("main script, main img, main b, main a[href^=java]").count() == 0
            assert tab.evaluate("window.ran") is None
            assert said == []  # nothing came as far as the policy, which holds where escaping fails
            tab.evaluate(
                "document.body.append(Object.assign(document.createElement('script'), "
                "{textContent: 'window.ran = 1'}))"
            )
            assert tab.evaluate("window.ran") is None
            tab.wait_for_timeout(100)


def hostile_requests(path):
    rows = pq.ParquetFile(path).read().to_pylist()
    for row in rows:
        row["request"] = f"<img src=x onerror='window.ran = 1'>{row['request']}"
    pq.write_table(pa.Table.from_pylist(rows), path)
