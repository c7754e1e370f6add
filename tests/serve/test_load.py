"""Many requests at once, clients that go away, and a server that stops."""

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx2
import openai
import psutil
import pytest

from running_server import client_of, new_served, running

LENGTHS = (1, 3, 7, 16, 30)
PROMPTS = [f"{'to be, or not to be'[: 1 + number % 19]}" for number in range(19)]


@pytest.fixture(params=["sequential", "batching"])
def served(request: pytest.FixtureRequest) -> Any:
    return new_served(continuous_batching=request.param == "batching")


async def answers(url: str, count: int, at_once: int) -> list[tuple[str, int, str]]:
    """(prompt, new tokens, text) of many requests."""
    limit = asyncio.Semaphore(at_once)
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=300) as client:

        async def one(number: int) -> tuple[str, int, str]:
            prompt, new = PROMPTS[number % len(PROMPTS)], LENGTHS[number % len(LENGTHS)]
            async with limit:
                asked: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": new, "temperature": 0}
                if number % 2:
                    events = await client.completions.create(**asked, stream=True)
                    return prompt, new, "".join([event.choices[0].text async for event in events])
                return prompt, new, (await client.completions.create(**asked)).choices[0].text

        return await asyncio.gather(*[one(number) for number in range(count)])


@pytest.mark.parametrize(
    "count", [24, pytest.param(200, marks=[pytest.mark.all, pytest.mark.slow])], ids=lambda count: f"{count} requests"
)
def test_each_of_many_gets_what_generate_writes(served: Any, alone: Callable[..., str], count: int) -> None:
    with running(served) as url:
        given = asyncio.run(answers(url, count, 16))
    assert len(given) == count
    expected = {(prompt, new): alone(prompt, new) for prompt, new, _ in given}
    assert [text for _, _, text in given] == [expected[prompt, new] for prompt, new, _ in given]


@pytest.mark.all
@pytest.mark.slow
def test_memory_does_not_grow(served: Any) -> None:
    process = psutil.Process()
    with running(served) as url:
        asyncio.run(answers(url, 200, 16))
        gc.collect()
        before = process.memory_info().rss
        asyncio.run(answers(url, 1000, 16))
        gc.collect()
        assert process.memory_info().rss - before < 20 << 20


class SlowSteps:
    """Makes every forward pass of a model with a cache take a moment, and counts them."""

    def __init__(self, served: Any, seconds: float) -> None:
        self.count = 0
        model = served.engine.model
        model.register_forward_pre_hook(lambda *_: self.step(seconds))

    def step(self, seconds: float) -> None:
        self.count += 1
        time.sleep(seconds)

    def rests(self) -> bool:
        """Whether nothing is computed for a while."""
        before = self.count
        time.sleep(0.3)
        return self.count <= before + 1


@pytest.mark.parametrize("settings", [{}, {"logprobs": 1}], ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_frees_its_place(
    served: Any, alone: Callable[..., str], stream: bool, settings: dict[str, Any]
) -> None:
    steps = SlowSteps(served, 0.03)
    asked: dict[str, Any] = {"model": "tiny", "prompt": "to be", "max_tokens": 90, "temperature": 0, **settings}
    with running(served) as url, client_of(url) as client:
        if stream:
            with client.completions.create(**asked, stream=True) as events:
                next(iter(events))
        else:
            with pytest.raises(openai.APITimeoutError):
                client.with_options(timeout=0.3).completions.create(**asked)
        time.sleep(0.2)
        assert steps.rests()
        assert 0 < steps.count < 60
        answer = client.completions.create(**{**asked, "max_tokens": 3})
        assert answer.choices[0].text == alone("to be", 3)


def test_clients_that_hang_up_leave_nothing_behind() -> None:
    """transformers keeps what is registered for a request until the request has ended."""
    served = new_served(continuous_batching=True)
    SlowSteps(served, 0.005)
    asked: dict[str, Any] = {"model": "tiny", "prompt": "to be", "max_tokens": 90, "temperature": 0, "stream": True}
    with running(served) as url, client_of(url) as client:
        for _ in range(10):
            with client.completions.create(**asked) as events:
                next(iter(events))
        time.sleep(0.3)
        router = served.engine._batches.output_router
        assert router.result_handlers == {}
        assert router.output_queue.qsize() < 5
        assert served.engine._batches.batch_processor.scheduler.active_requests == {}


def test_a_request_that_waits_can_be_given_up() -> None:
    """It is never begun."""
    served = new_served()
    steps = SlowSteps(served, 0.03)
    asked: dict[str, Any] = {"model": "tiny", "prompt": "to be", "temperature": 0}
    with running(served) as url, client_of(url) as client:
        first = threading.Thread(target=lambda: client.completions.create(**asked, max_tokens=20))
        first.start()
        time.sleep(0.1)
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.1).completions.create(**asked, max_tokens=80)
        first.join()
        assert steps.rests()
    assert steps.count <= 22


def test_a_server_that_stops_ends_its_streams(served: Any) -> None:
    SlowSteps(served, 0.03)
    asked: dict[str, Any] = {"model": "tiny", "prompt": "to be", "max_tokens": 90, "temperature": 0}
    outcomes: list[str] = []

    def whole() -> None:
        with pytest.raises(openai.InternalServerError, match=r"The server is stopping\.") as caught:
            client.completions.create(**asked)
        outcomes.append(str(caught.value.status_code))

    with contextlib.ExitStack() as clients:
        with running(served) as url:
            client = clients.enter_context(client_of(url))
            events = iter(client.completions.create(**asked, stream=True))
            next(events)
            other = threading.Thread(target=whole)
            other.start()
            time.sleep(0.3)  # until its request is there
        # The server has ended, and has not waited for its streams, which would have ended well.
        with pytest.raises(openai.APIError, match=r"The server is stopping\."):
            list(events)
        other.join()
    assert outcomes == ["503"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_pass_that_fails_is_said(served: Any, stream: bool) -> None:
    """To whoever waits for it. A batch ends with it, and so do all that would come later: /health says so."""

    def fail(*_: Any) -> None:
        raise MemoryError("no memory for the batch")

    def ask() -> list[Any]:
        return list(client.completions.create(model="tiny", prompt="to be", max_tokens=5, stream=stream))

    with running(served) as url, client_of(url) as client:
        assert ask()
        hook = served.engine.model.register_forward_pre_hook(fail)
        with pytest.raises(openai.APIError) as caught:
            ask()
        assert "no memory for the batch" in str(caught.value) if stream else "The server failed" in str(caught.value)
        hook.remove()
        health = httpx2.get(url.removesuffix("/v1") + "/health").status_code
        assert health == (200 if type(served.engine).__name__ == "SequentialEngine" else 503)
        if health == 200:
            assert ask()
        else:
            with pytest.raises(openai.APIError):
                ask()


def test_the_batch_is_one() -> None:
    """So that no test above compares one engine with itself: in a batch several requests share a forward pass."""
    served = new_served(continuous_batching=True)
    steps = SlowSteps(served, 0.02)
    with running(served) as url, client_of(url) as client:
        client.completions.create(model="tiny", prompt=["a", "b", "c", "d"], max_tokens=20, temperature=0)
    assert steps.count < 40
