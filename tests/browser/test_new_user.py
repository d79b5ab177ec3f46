"""Answers to a new user's questions about real runs, on the run page."""

import json
import re

import pytest
import pytest_asyncio

from tests.helpers.cli import slipstream
from tests.helpers.new_user import Mouse, write_task
from tests.helpers.system import running_system
from tests.helpers.tracked import curve, needs, of_tensorboard

playwright = pytest.importorskip("playwright.async_api")
expect = playwright.expect
pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

ANOTHER_TERM = "rollout.rewards=[{name: rewards.py:score}, {name: rewards.py:brief, weight: 0.5}]"


class Runs:
    """Client of services with two runs: an ended one, and a running one with another reward term."""

    def __init__(self, url: str, spec: str) -> None:
        self.url = url
        submitted = self.slipstream("submit", spec)
        self.ended = submitted.strip()
        self.slipstream("watch", self.ended)
        changes = ("name=longer", "trainer.steps=100000", ANOTHER_TERM)
        settings = [argument for change in changes for argument in ("--set", change)]
        self.going = self.slipstream("submit", spec, *settings).strip()

    def slipstream(self, *arguments: str) -> str:
        result = slipstream(*arguments, "--url", self.url)
        assert result.code == 0, result.out + result.err
        return result.out


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("new_user")
    spec = write_task(folder)
    with running_system(folder / "runs") as system:
        yield Runs(system.url, str(spec))


@pytest_asyncio.fixture(loop_scope="session")
async def opened(browser, runs):
    """Opens a page with a link from the command line; console errors fail the test."""
    errors = []
    context = await browser.new_context(viewport={"width": 1280, "height": 900})
    page = await context.new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
    await page.goto(runs.slipstream("page").strip())
    await expect(page.locator("#name")).not_to_be_empty()

    async def at(path):
        await page.goto(f"{runs.url}/runs/{path}")
        await expect(page.locator("#name")).not_to_be_empty()
        return page

    yield at
    await context.close()
    assert errors == []


def chart(page, title):
    return page.locator(f'figure[data-chart="{title}"]')


async def test_why_the_reward_fell(opened, runs):
    page = await opened(runs.ended)
    await expect(page.locator("#learning")).to_contain_text("reward fell from")
    await expect(page.locator("#learning")).to_contain_text("reward/style from")
    mouse, reward = Mouse(page), chart(page, "Reward")
    await mouse.click(reward.locator(".u-over"))
    link = reward.get_by_role("link", name=re.compile("samples of step"))
    step = re.search(r"\d+", await link.text_content())[0]
    await mouse.click(link)
    sample = page.get_by_role("article", name="One sample")
    await expect(sample.get_by_role("region", name="Reward by term")).to_contain_text("style")
    await expect(page.get_by_label("step", exact=True)).to_have_value(step)


async def test_the_worst_answer_of_step_20(opened, runs):
    page = await opened(runs.ended)
    mouse = Mouse(page)
    await mouse.click(page.get_by_role("tab", name="Samples"))
    await mouse.write(page.get_by_label("step", exact=True), "20")
    await mouse.choose(page.get_by_label("order"), "worst")
    current_item = page.get_by_role("list", name="Samples").locator("button[aria-current=true]")
    await expect(current_item).to_contain_text("step 20")
    listed_sample = json.loads(
        runs.slipstream("samples", runs.ended, "--step", "20", "--worst", "--limit", "1", "--json")
    )
    article = page.get_by_role("article", name="One sample")
    await expect(article).to_contain_text(f"Sample {listed_sample['id']}")
    rewards = await page.locator("ol.samples .reward").all_inner_texts()
    assert rewards == sorted(rewards, key=float)


async def test_two_runs_are_compared(opened, runs):
    page = await opened(runs.ended)
    mouse = Mouse(page)
    await mouse.click(page.get_by_label(re.compile("Compare with longer")))
    legend = chart(page, "Reward").locator(".legend")
    await expect(legend).to_contain_text("digits mean")
    await expect(legend).to_contain_text("longer mean")
    await mouse.click(page.get_by_role("tab", name="Configuration"))
    await expect(page.locator("tr", has_text="trainer.steps")).to_contain_text("24100000")


async def test_another_reward_term_is_drawn(opened, runs):
    """The term needs one command, ``slipstream submit``, with one more line in the specification."""
    page = await opened(runs.going)
    await expect(chart(page, "Reward by term").locator(".legend")).to_contain_text("brief")


async def test_which_side_is_the_bottleneck(opened, runs):
    page = await opened(runs.going)
    await expect(page.locator("#verdict")).to_contain_text(
        re.compile("is the bottleneck|are the bottleneck|are balanced|wait for each other")
    )


@needs("tensorboard")
async def test_the_numbers_go_to_a_tracker(runs, tmp_path):
    """One command exports an ended run without a tracker; one line of the specification tracks a new run."""
    runs.slipstream("track", runs.ended, "--to", "tensorboard", "--folder", str(tmp_path))
    curves = of_tensorboard(tmp_path)
    assert curve(curves, "reward_mean") == [*range(1, 25)]
    assert curve(curves, "heldout/greedy") == [0, 12, 24]


async def test_a_stopped_run_stays_listed(opened, runs):
    page = await opened(runs.going)
    mouse = Mouse(page)
    await mouse.click(page.get_by_role("button", name="Pause"))
    await mouse.click(page.get_by_role("dialog").get_by_role("button", name="Pause"))
    await expect(page.locator("#state")).to_have_text("PAUSED", timeout=120_000)
    await expect(page.get_by_role("button", name="Resume")).to_be_visible()
    assert "READY" in runs.slipstream("checkpoints", runs.going)


async def test_samples_of_a_real_run(opened, runs):
    page = await opened(f"{runs.ended}/samples")
    items = page.get_by_role("list", name="Samples").get_by_role("button")
    article = page.get_by_role("article", name="One sample")
    await expect(items).to_have_count(50)
    # The tokens of a sample, in every available coloring.
    tokens = article.locator(".token")
    text = await article.get_by_role("group", name="Response, token by token").inner_text()
    assert text == "".join(await tokens.all_inner_texts())
    assert "ratio" in await tokens.first.get_attribute("title")
    for colour, looks in (("weight version", "token version-"), ("logprob", "token level-")):
        await article.get_by_role("button", name=colour, exact=True).click()
        assert any(
            looks in name for name in [await t.get_attribute("class") for t in await tokens.all()]
        )
    # The sample's group, and the difference of another member.
    group = article.get_by_role("region", name="The group")
    await expect(group.locator("tbody tr")).to_have_count(4)
    await group.get_by_role("button", name="diff").first.click()
    await expect(article.locator("ins, del, span.same").first).to_be_visible()
    # Samples of evaluations; the page's address contains the search.
    await page.get_by_label("samples of").select_option("heldout")
    await expect(items.first).to_be_visible()
    await page.reload()
    await expect(page.get_by_label("samples of")).to_have_value("heldout")
    # A search finds the text of a listed sample, and nothing for another text.
    prompt = await article.locator("pre.text").first.inner_text()
    await page.get_by_label("text", exact=True).fill("no such text")
    await page.get_by_label("text", exact=True).press("Enter")
    await expect(page.get_by_text("No samples match")).to_be_visible()
    await page.get_by_label("text", exact=True).fill(prompt)
    await page.get_by_label("text", exact=True).press("Enter")
    await expect(items.first).to_contain_text(prompt)
    async with page.expect_download() as download:
        await page.get_by_role("button", name="download as JSONL").click()
    lines = (await (await download.value).path()).read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    assert {sample["prompt"] for sample in samples} == {prompt}
    assert {sample["split"] for sample in samples} == {"heldout"}
    assert all(len(sample["tokens"]["texts"]) == sample["response_tokens"] for sample in samples)
