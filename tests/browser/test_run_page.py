"""The run page in a real browser, over a controller's API."""

import json
import re
from collections import Counter

import pytest

from services.controller.rules.run_state import RunEvent
from services.controller.store.records import Note
from tests.helpers.rest import save

playwright = pytest.importorskip("playwright.async_api")
expect = playwright.expect
pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]

TABS = ("", "timeline", "samples", "events", "workers", "checkpoints", "configuration")


def chart(page, title):
    return page.locator(f'figure[data-chart="{title}"]')


async def test_the_page_opens_on_what_is_running_and_is_live(open_page, controller):
    page = await open_page()
    await expect(page.locator("#name")).to_have_text("sort4")
    assert page.url == f"{controller.url}/runs/{controller.running}"
    await expect(page.locator("#state")).to_have_text("RUNNING")
    await expect(page.locator("#progress")).to_have_text(
        "step 10 of 20 · weight version 10 · disaggregated · about 20 s left"
    )
    await expect(page.locator("#verdict")).to_have_text(
        "Rollouts are the bottleneck: in the last 10 steps the trainer waited for samples 75 % of the time, "
        "and the rollouts were idle 0 %. Predicted: rollout.replicas 2 instead of 1 would give 1.6x."
    )
    await expect(page.locator("#prompts")).to_have_text(
        "40 prompts issued: 30 consumed, 10 dropped (10 stale)"
    )
    reward = chart(page, "Reward")
    await expect(reward.locator("canvas")).to_have_count(1)
    await expect(reward.locator(".legend")).to_contain_text("mean 0.5")
    await expect(chart(page, "Held-out score").locator(".legend")).to_contain_text("greedy 0.75")

    controller.train(controller.running, 11)
    await expect(reward.locator(".legend")).to_contain_text("mean 0.55")
    await expect(page.locator("#progress")).to_contain_text("step 11 of 20")
    controller.train(controller.running, 10)  # the run was rewound
    await expect(reward.locator(".legend")).to_contain_text("mean 0.5")


@pytest.mark.parametrize("which", ["running", "ended", "failed"])
async def test_every_tab_opens_and_stays_in_order(open_page, controller, which):
    run = getattr(controller, which)
    page = await open_page(f"/runs/{run}")
    for index, tab in enumerate(await page.get_by_role("tab").all()):
        await tab.click()
        await expect(page.locator("#panel > *").first).to_be_visible()
        # Waits for two of the page's updates, one every two seconds, with an event in between.
        for turn in range(2):
            async with page.expect_response("**/v1/runs?page_size=200"):
                if which == "running":
                    controller.note(run, Note("Tried", f"while {index}.{turn} is open"))
        await expect(page.locator("#trouble")).to_be_hidden()
        await expect(tab).to_have_attribute("aria-selected", "true")


async def test_charts_without_values_are_folded_until_they_have_some(open_page, controller):
    run = controller.create("fresh")
    page = await open_page(f"/runs/{run}")
    titles = page.locator("figure:visible b")
    key = ["Reward", "Held-out score", "Response length", "Time of a step"]
    await expect(titles).to_have_text(key)
    await expect(page.get_by_text("Without values:")).to_contain_text("Gradient norm")
    controller.train(run, 1)
    await chart(page, "Gradient norm").scroll_into_view_if_needed()
    await expect(chart(page, "Gradient norm").locator(".legend")).to_contain_text("norm")
    await expect(page.get_by_text("Without values:")).not_to_contain_text("Gradient norm")
    assert (await titles.all_inner_texts())[:4] == key
    controller.end(run)  # other tests open the page at the run that is running


async def test_on_a_phone_the_list_of_runs_is_folded_and_closes_behind_a_choice(
    open_page, controller
):
    page = await open_page(f"/runs/{controller.ended}", width=390)
    await expect(page.locator("#runs")).to_be_hidden()
    assert await page.evaluate("document.querySelector('nav').offsetHeight") < 90
    await page.get_by_text("Runs", exact=True).click()
    await page.locator("#runs a", has_text="broken").click()
    await expect(page.locator("#name")).to_have_text("broken")
    await expect(page.locator("#runs")).to_be_hidden()


async def test_values_are_under_the_cursor_of_mouse_and_keys(open_page, controller):
    page = await open_page(f"/runs/{controller.ended}")
    reward = chart(page, "Reward")
    await expect(reward.locator(".legend")).to_contain_text("mean -1")
    box = await reward.locator(".u-over").bounding_box()
    await page.mouse.move(box["x"] + 1, box["y"] + 20)
    await expect(reward.locator(".where")).to_have_text("step 1")
    await expect(reward.locator(".legend")).to_contain_text("mean -0.0833")
    await expect(chart(page, "Loss").locator(".where")).to_have_text("step 1")  # all charts follow
    await reward.locator(".plot").focus()
    await page.keyboard.press("ArrowRight")
    await expect(reward.locator(".where")).to_have_text("step 2")
    assert "step 2: mean -0.167" in await reward.locator(".plot").get_attribute("aria-label")
    await reward.locator(".legend button").first.click()
    await expect(reward.locator(".legend button").first).to_have_attribute("aria-pressed", "false")


async def test_curves_are_zoomed_smoothed_and_drawn_on_other_axes(open_page, controller):
    page = await open_page(f"/runs/{controller.ended}")
    reward = chart(page, "Reward")
    await expect(reward.locator(".legend")).to_contain_text("mean -1")
    box = await reward.locator(".u-over").bounding_box()
    await page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 30)
    await page.mouse.down()
    await page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 40, steps=4)
    await page.mouse.up()
    first, last = page.get_by_label("First step"), page.get_by_label("Last step")
    await expect(first).to_have_value(re.compile("3|4"))
    await expect(last).to_have_value(re.compile("7|8"))
    await page.get_by_role("button", name="all", exact=True).click()
    await expect(reward.locator(".legend")).to_contain_text("mean -1")
    await first.fill("2")
    await last.fill("5")
    await page.get_by_role("button", name="show", exact=True).click()
    await page.mouse.move(0, 0)
    await expect(reward.locator(".legend")).to_contain_text("mean -0.417")
    await page.get_by_label("Smoothing").fill("0.9")
    await expect(reward.locator(".legend")).not_to_contain_text("mean -0.417")
    await page.get_by_label("Logarithmic axis for Gradient norm").click()
    await expect(chart(page, "Gradient norm").locator(".legend")).to_contain_text("norm")
    await page.get_by_role("button", name="time", exact=True).click()
    await expect(first).to_have_value("")
    await expect(chart(page, "Reward by term").locator(".legend")).to_contain_text("format 0.5")
    await page.get_by_text("All other metrics of steps").click()
    further = chart(page, "no_chart_names_it")
    await further.scroll_into_view_if_needed()
    await expect(further.locator(".legend")).to_contain_text("no_chart_names_it 2")


async def test_histograms_show_the_distribution_of_samples(open_page, controller):
    page = await open_page(f"/runs/{controller.ended}")
    await chart(page, "Staleness of samples").scroll_into_view_if_needed()
    await expect(chart(page, "Staleness of samples").locator(".legend")).to_have_text("0: 1 · 1: 7")
    await expect(chart(page, "Length of responses").locator(".legend")).to_have_text("5\u20136: 8")


async def test_runs_are_compared_by_a_link_or_a_box(open_page, controller):
    page = await open_page(f"/runs/{controller.ended}")
    await page.get_by_label("Compare with sort4 000002").check()
    await expect(page).to_have_url(
        f"{controller.url}/runs/{controller.ended}?with={controller.running}"
    )
    legend = chart(page, "Reward").locator(".legend")
    await expect(legend).to_contain_text("sort4 000003 mean -1")
    await expect(legend).to_contain_text("sort4 000002 mean")
    await page.get_by_role("tab", name="Configuration").click()
    row = page.locator("tr", has_text="trainer.optimizer.learning_rate")
    await expect(row).to_contain_text("0.50.000001")
    await page.go_back()
    await expect(legend).to_contain_text("sort4 000002 mean")


async def test_a_run_that_ended_before_its_first_step_shows_its_reason_instead_of_charts(
    open_page, controller
):
    run = controller.create("stopped")
    for event in (RunEvent.CANCEL, RunEvent.STOPPED):
        controller.store.apply(run, event, reason="CancelledByUser")
    page = await open_page(f"/runs/{run}")
    await expect(page.locator("#message")).to_have_text("Cancelled by user")
    await expect(page.locator("#progress")).not_to_contain_text("weight version")
    await expect(page.get_by_text("The run ended before its first step")).to_be_visible()
    await expect(page.locator("figure:visible")).to_have_count(0)


@pytest.mark.parametrize(("width", "columns"), [(1440, 4), (1280, 2)])
async def test_the_first_four_charts_fill_their_rows(open_page, controller, width, columns):
    page = await open_page(f"/runs/{controller.ended}", width=width)
    first = page.get_by_role("region", name="At a glance").locator("figure")
    await expect(first).to_have_count(4)
    tops = [(await figure.bounding_box())["y"] for figure in await first.all()]
    assert sorted(Counter(tops).values()) == [columns] * (4 // columns)


async def test_a_single_term_that_is_the_reward_has_no_chart_of_its_own(open_page, controller):
    run = controller.create("one-term")
    controller.train(run, 1, **{"reward/format": 0.05})
    page = await open_page(f"/runs/{run}")
    await expect(chart(page, "Reward").locator(".legend")).to_contain_text("mean 0.05")
    await expect(chart(page, "Reward by term")).to_be_hidden()
    await expect(page.get_by_text("Without values:")).not_to_contain_text("Reward by term")
    controller.train(run, 2, **{"reward/format": 0.7})
    await expect(chart(page, "Reward by term")).to_be_visible()
    controller.end(run)


async def test_checkpoints_with_long_folders_fit_the_page(open_page, controller):
    run = controller.create("long-folders")
    controller.end(run)
    path = f"/mnt/checkpoints/{'a-long-folder-' * 8}/step-00000010"
    save(controller.store.database, run, step=10, path=path)
    page = await open_page(f"/runs/{run}/checkpoints", width=1440)
    table = page.get_by_role("region", name="Checkpoints")
    await expect(table.get_by_role("button", name="delete")).to_be_visible()
    assert await table.evaluate("e => e.scrollWidth <= e.clientWidth")


def server(number, **facts):
    """Returns the state of a server as the API shows it."""
    plain = {"is_healthy": True, "problem": "", "exclusive_run": None, "weight_version": None}
    return {"address": f"http://server-{number}:8000", "runs": [], **plain, **facts}


@pytest.mark.parametrize("width", [1440, 390])
async def test_the_servers_of_a_run_are_shown_with_its_part_or_their_problem(
    open_page, controller, width
):
    run = controller.running
    use = {"weight_version": 9, "tokens": 1234567, "running": 12, "waiting": 3}
    servers = [
        server(
            0, runs=[{"run_id": run, "share": 2.0, **use}, {"run_id": None, "share": 1.0, **use}]
        ),
        server(1, exclusive_run=run, weight_version=8),
        server(2, is_healthy=False, problem="no answer within 3 s"),
        server(3, exclusive_run="run_other", weight_version=5),
    ]

    async def fleets(route):
        await route.fulfill(json={"items": [{"name": "shared", "servers": servers}]})

    async def view(route):
        answer = await route.fetch()
        content = await answer.json()
        addresses = [f"http://server-{number}:8000" for number in range(3)]
        content["spec"]["rollout"]["engine_arguments"] = {"addresses": addresses}
        await route.fulfill(response=answer, json=content)

    page = await open_page(f"/runs/{run}", width=width)
    await page.route("**/v1/fleets", fleets)
    await page.route(f"**/v1/runs/{run}", view)
    await page.goto(f"{controller.url}/runs/{run}/workers")
    rows = page.get_by_role("region", name="Servers").locator("tbody tr")
    await expect(rows).to_have_count(3)
    cells = [await row.locator("td").all_inner_texts() for row in await rows.all()]
    assert [row[1:5] for row in cells] == [
        ["http://server-0:8000", "answers", "67 %", "9"],
        ["http://server-1:8000", "answers", "all", "8"],
        ["http://server-2:8000", "no answer within 3 s", "–", "–"],  # noqa: RUF001
    ]
    assert cells[0][5:] == ["1,234,567", "12", "3", "1"]
    assert await page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("state", ["ended", "running", "failed", "cancelled", "new"])
@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (1024, "dark")])
async def test_every_tab_of_every_state_fits_its_window_and_axe_finds_nothing(
    open_page, controller, state, width, scheme
):
    axe = pytest.importorskip("axe_playwright_python.async_playwright").Axe()
    run = getattr(controller, state, None) or controller.create(state)
    if state == "ended":
        save(controller.store.database, run, step=width, path="/checkpoints/step")
    if state == "cancelled":
        for event in (RunEvent.CANCEL, RunEvent.STOPPED):
            controller.store.apply(run, event, reason="CancelledByUser")
    page = await open_page(f"/runs/{run}", width=width, scheme=scheme)
    for tab in TABS:
        await page.goto(f"{controller.url}/runs/{run}/{tab}")
        await expect(page.locator("#panel > *").first).to_be_visible()
        violations = (await axe.run(page)).response["violations"]
        assert [(rule["id"], rule["nodes"][0]["html"]) for rule in violations] == [], tab
        assert await page.evaluate("document.documentElement.scrollWidth") <= width, tab
    if state == "new":
        controller.end(run)


async def test_the_time_line_shows_work_and_waits(open_page, controller):
    page = await open_page(f"/runs/{controller.ended}/timeline")
    await expect(page.locator("figure .legend")).to_contain_text("idle")
    shares = page.get_by_role("region", name="Shares of the window")
    rows = {text.split("\t")[0]: text for text in (await _rows(shares))}
    assert list(rows) == ["trainer", "rollout-0", "rollout-1", "weight sync"]
    assert "waits for groups" in rows["trainer"]
    assert "idle" in rows["rollout-1"]
    sums = {name: sum(map(int, re.findall(r"(\d+) %", row))) for name, row in rows.items()}
    assert sums == dict.fromkeys(rows, 100)
    line = page.get_by_role("img", name="Time line")
    await line.focus()
    await page.keyboard.press("ArrowRight")
    await expect(page.locator(".label")).to_contain_text("step 1: waits for groups")


async def _rows(region):
    await expect(region.locator("tbody tr").first).to_be_visible()
    return [
        "\t".join(await row.locator("td").all_inner_texts())
        for row in await region.locator("tbody tr").all()
    ]


async def test_events_are_shown_as_text(open_page, controller):
    page = await open_page(f"/runs/{controller.running}/events")
    await expect(page.locator("#events")).to_contain_text("<b>rollout-1</b> ended")
    await expect(page.locator("#events")).not_to_contain_text("trained step")
    await expect(page.locator("#conditions")).to_contain_text("Admitted")
    await page.get_by_role("tab", name="Events").focus()
    await page.keyboard.press("ArrowRight")
    await expect(page).to_have_url(re.compile("/workers$"))
    await expect(page.locator("#logs")).to_have_text("trainer-0  step 10 <i>done</i>\n")
    with (controller.folder / controller.running / "logs" / "rollout-0.log").open("a") as log:
        log.write("weights synced\n")
    await expect(page.locator("#logs")).to_contain_text("rollout-0  weights synced")
    await page.select_option("#component", "rollout-0")
    await expect(page.locator("#logs")).to_have_text("weights synced\n")


async def test_events_that_come_before_the_first_page_of_them_hide_none(open_page, controller):
    page = await open_page(f"/runs/{controller.running}")
    listed = page.locator("#events li")

    async def late(route):
        await listed.first.wait_for()
        await route.continue_()

    await page.route("**/events?order_by=-seq&limit=100&*", late)
    await page.get_by_role("tab", name="Events").click()
    controller.note(controller.running, Note("Tried", "before the page"))
    await expect(page.locator("#events")).to_contain_text("<b>rollout-1</b> ended")
    texts = await listed.all_inner_texts()
    assert len(texts) == len(set(texts))
    assert "before the page" in texts[0]


async def test_why_a_run_failed_stands_at_its_top(open_page, controller):
    page = await open_page(f"/runs/{controller.failed}")
    await expect(page.locator("#message")).to_have_text("trainer-0 ended: out of memory")


async def test_the_configuration_shows_what_differs_from_the_defaults(open_page, controller):
    page = await open_page(f"/runs/{controller.ended}/configuration")
    panel = page.locator("#panel")
    await expect(panel.locator("tr", has_text="trainer.optimizer.learning_rate")).to_contain_text(
        "0.5"
    )
    await expect(panel).not_to_contain_text("trainer.optimizer.weight_decay")
    # Its default follows from algorithm.max_staleness.
    await expect(panel).not_to_contain_text("rollout.partial_rollout")
    await expect(panel.locator("td:nth-child(2)", has_text=re.compile("^null$"))).to_have_count(0)
    await page.get_by_role("button", name="all", exact=True).click()
    await page.get_by_label("Search the configuration").fill("weight_decay")
    await expect(panel.locator("tbody tr")).to_have_count(1)


def _sample(member, *, reward, texts, is_whole):
    sample = {
        "id": f"g00000007.{member}",
        "group_id": "g00000007",
        "member": member,
        "attempt": 1,
        "split": "train",
        "row": 7,
        "data_source": "sums",
        "step": 5,
        "oldest_version": 3,
        "newest_version": 4,
        "staleness": 1,
        "reward": reward,
        "terms": {"correct": reward},
        "advantage": reward - 0.5,
        "ratio": 1.1,
        "finish_reason": "stop",
        "is_greedy": False,
        "prompt_tokens": 3,
        "response_tokens": len(texts),
        "num_turns": 1,
        "num_segments": 2,
        "time": "2026-01-01T00:00:00Z",
        "prompt": "1 + 1 = <b>",
        "response": "".join(texts),
    }
    count = len(texts)
    tokens = {
        "ids": list(range(count)),
        "texts": texts,
        "logprobs": [-0.5] * count,
        "weight_versions": [3] * (count - 1) + [4],
        "is_trained": [True] * count,
        "advantages": [reward - 0.5] * count,
        "trained_logprobs": [-0.4] * count,
        "ratios": [1.0] * (count - 1) + [2.0],
    }
    return {**sample, "answer": "2", "turns": [], "tokens": tokens} if is_whole else sample


async def test_samples_are_found_coloured_and_compared_in_their_group(open_page, controller):
    page = await open_page(f"/runs/{controller.ended}")
    texts = {0: ["so", " it", " is", " 2"], 1: ["so", " is", " 3"]}
    urls = []

    async def answer(route):
        urls.append(route.request.url)
        match = re.search(r"/samples/g00000007[.](\d)", route.request.url)
        samples = [
            _sample(member, reward=1.0 - member, texts=texts[member], is_whole=bool(match))
            for member in ([int(match[1])] if match else texts)
        ]
        if len(urls) == 1:  # the list is read before the step trains them
            samples = [{**sample, "step": None} for sample in samples]
        await route.fulfill(json=samples[0] if match else {"items": samples, "next_page_token": ""})

    await page.route("**/samples*", answer)
    await page.route("**/samples/*", answer)
    await page.get_by_role("tab", name="Samples").click()
    items = page.get_by_role("list", name="Samples").get_by_role("button")
    await expect(items).to_have_count(2)
    article = page.get_by_role("article", name="One sample")
    await expect(items.first).to_contain_text("step 5")
    await expect(items.last).to_contain_text("step 5")
    await expect(article.locator("pre.text").first).to_have_text("1 + 1 = <b>")
    await expect(article).to_contain_text("correct")
    token = article.locator(".token", has_text="2")
    await expect(token).to_have_class("token level-3")  # twice as likely for the trainer
    assert "version 4" in await token.get_attribute("title")
    await article.get_by_role("button", name="weight version").click()
    await expect(token).to_have_class("token version-1")
    await article.get_by_role("button", name="diff").click()
    await expect(article.locator("del")).to_have_text([" 3"])
    await expect(article.locator("ins")).to_have_text([" it", " 2"])
    await page.get_by_label("order").select_option("worst")
    await page.get_by_label("text", exact=True).fill("so it")
    await page.get_by_label("text", exact=True).press("Enter")
    await expect(items).to_have_count(2)
    assert any("order_by=worst" in url and "text=so+it" in url for url in urls)


async def test_only_what_a_role_may_is_offered(open_page, controller):
    async def offered(role, run):
        page = await open_page(f"/runs/{run}", role=role)
        await expect(page.locator("#state")).not_to_be_empty()
        await page.wait_for_function("document.getElementById('actions').dataset.key")
        return await page.locator("#actions button").all_inner_texts()

    assert await offered("viewer", controller.running) == []
    assert await offered("operator", controller.ended) == ["Fork"]
    assert await offered("admin", controller.ended) == ["Fork", "Delete"]
    assert await offered("operator", controller.running) == [
        *("Evaluate", "Save checkpoint", "Pause", "Change", "Fork", "Cancel")
    ]


async def test_a_run_is_changed_and_a_refusal_is_shown(open_page, controller):
    page = await open_page(f"/runs/{controller.running}")
    await page.get_by_role("button", name="Change").click()
    dialog = page.get_by_role("dialog")
    await dialog.get_by_label("save every").fill("5")
    await dialog.get_by_role("button", name="Change").click()
    await expect(page.locator("#said")).to_have_text("Change: request accepted.")
    spec = json.loads(controller.store.get(controller.running).spec_json)
    assert spec["trainer"]["checkpoint"]["every"] == 5
    await page.get_by_role("button", name="Change").click()
    await dialog.get_by_role("button", name="Close").click()
    await expect(dialog).to_have_count(0)


async def test_an_unknown_browser_needs_a_token_and_a_link_works_once(browser, controller):
    code = controller.code("viewer")
    for is_first in (True, False):
        context = await browser.new_context()
        page = await context.new_page()
        await page.goto(f"{controller.url}/page/#code={code}")
        if is_first:
            await expect(page.locator("#name")).to_have_text("sort4")
            assert "code" not in page.url
        else:
            await expect(page.locator("#sign-in")).to_be_visible()
            who = (await controller.links.sign_in(controller.code("viewer"))).token
            await page.fill("#token", who)
            await page.click("#sign-in button")
            await expect(page.locator("#name")).to_have_text("sort4")
            await expect(page.locator("#sign-in")).to_be_hidden()
        await context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_every_tab_fits_a_phone(open_page, controller, scheme):
    page = await open_page(f"/runs/{controller.ended}", width=390, scheme=scheme)
    for tab in TABS:
        await page.goto(f"{controller.url}/runs/{controller.ended}/{tab}")
        await expect(page.locator("#panel > *").first).to_be_visible()
        width = await page.evaluate("document.documentElement.scrollWidth")
        assert width <= 390, tab


async def test_whatever_can_be_used_has_a_name_for_screen_readers(open_page, controller):
    page = await open_page(f"/runs/{controller.ended}")
    for tab in TABS:
        await page.goto(f"{controller.url}/runs/{controller.ended}/{tab}")
        await expect(page.locator("#panel > *").first).to_be_visible()
        nameless = await page.evaluate(
            """() => [...document.querySelectorAll("button, a, input, select, [tabindex], canvas[role]")]
            .filter((e) => e.checkVisibility() && !(e.getAttribute("aria-label") || e.textContent.trim()
              || e.labels?.length || e.getAttribute("aria-labelledby")))
            .map((e) => e.outerHTML)"""
        )
        assert nameless == [], tab
        ids = await page.evaluate("[...document.querySelectorAll('[id]')].map((e) => e.id)")
        assert [name for name, count in Counter(ids).items() if count > 1] == [], tab


async def test_the_description_of_the_api_is_shown_without_a_network(open_page, controller):
    page = await open_page()
    await page.goto(f"{controller.url}/docs")
    await expect(page.locator(".opblock").first).to_be_visible()
