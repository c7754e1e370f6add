"""Many requests at once, clients that go away, and a server that stops."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx2
import openai
import pytest

from diff_lab.data import byte_tokenizer
from diff_transformer.serve.completion import ServedModel
from running_server import client_of, new_model, running

LENGTHS = (1, 3, 7, 16, 30)
PROMPTS = [f"{'to be, or not to be'[: 1 + number % 19]}" for number in range(19)]
ASKED: dict[str, Any] = {"model": "tiny", "prompt": "to be", "max_tokens": 90, "temperature": 0}


class Served:
    """A served model whose forward passes are counted, and may take a moment or fail."""

    def __init__(self) -> None:
        self.count, self.seconds, self.fails = 0, 0.0, False
        model = new_model()
        self.model = ServedModel(model, byte_tokenizer(), "tiny")
        model.register_forward_pre_hook(self.step)

    def step(self, *_: Any) -> None:
        self.count += 1
        time.sleep(self.seconds)
        if self.fails:
            raise MemoryError("no memory for it")

    def rests(self) -> bool:
        """Whether nothing is computed for a while, soon."""
        for _ in range(20):
            before = self.count
            time.sleep(0.3)
            if self.count == before:
                return True
        return False


@pytest.fixture
def served() -> Served:
    return Served()


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
    "count", [12, pytest.param(200, marks=[pytest.mark.all, pytest.mark.slow])], ids=lambda count: f"{count} requests"
)
def test_each_of_many_gets_what_generate_writes(served: Served, alone: Callable[..., str], count: int) -> None:
    with running(served.model) as url:
        given = asyncio.run(answers(url, count, 16))
    assert len(given) == count
    expected = {(prompt, new): alone(prompt, new) for prompt, new, _ in given}
    assert [text for _, _, text in given] == [expected[prompt, new] for prompt, new, _ in given]


def test_what_waits_is_generated_in_one_batch(served: Served, alone: Callable[..., str]) -> None:
    """The prompts of one request, and requests that come while others are answered; a seed stands alone."""
    prompts = PROMPTS[:6]
    with running(served.model) as url, client_of(url) as client:
        before = served.count
        answer = client.completions.create(model="tiny", prompt=prompts, max_tokens=30, temperature=0)
        assert [choice.text for choice in answer.choices] == [alone(prompt, 30) for prompt in prompts]
        assert served.count - before == 30
        before = served.count
        client.completions.create(model="tiny", prompt=prompts[:3], max_tokens=10, temperature=1, seed=5)
        assert served.count - before == 30
        served.model.angles_follow_length = True  # a longer prompt in the batch would turn them otherwise
        client.completions.create(model="tiny", prompt=prompts[:3], max_tokens=10, temperature=0)
        assert served.count - before == 60
    model = new_model()
    model.config.rope_parameters["rope_type"] = "dynamic"
    assert ServedModel(model, byte_tokenizer(), "tiny").angles_follow_length


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_frees_its_place(served: Served, alone: Callable[..., str], stream: bool) -> None:
    served.seconds = 0.1
    with running(served.model) as url, client_of(url) as client:
        if stream:
            with client.completions.create(**ASKED, stream=True) as events:
                next(iter(events))
        else:
            with pytest.raises(openai.APITimeoutError):
                client.with_options(timeout=1).completions.create(**ASKED)
        assert served.rests()
        assert 0 < served.count < 80
        answer = client.completions.create(**{**ASKED, "max_tokens": 3})
        assert answer.choices[0].text == alone("to be", 3)


def test_a_server_that_stops_ends_its_streams(served: Served) -> None:
    served.seconds = 0.1
    outcomes: list[str] = []

    def whole() -> None:
        with pytest.raises(openai.InternalServerError, match=r"The server is stopping\.") as caught:
            client.completions.create(**ASKED)
        outcomes.append(str(caught.value.status_code))

    with contextlib.ExitStack() as clients:
        with running(served.model) as url:
            client = clients.enter_context(client_of(url))
            events = iter(client.completions.create(**ASKED, stream=True))
            next(events)
            other = threading.Thread(target=whole)
            other.start()
            time.sleep(0.5)  # until its request is there
        # The server has ended, and has not waited for its streams, which would have ended well.
        with pytest.raises(openai.APIError, match=r"The server is stopping\."):
            list(events)
        other.join()
    assert outcomes == ["503"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_pass_that_fails_is_said(served: Served, stream: bool) -> None:
    """To whoever waits for it, and to nobody who comes later."""

    def ask() -> list[Any]:
        return list(client.completions.create(**{**ASKED, "max_tokens": 5}, stream=stream))

    with running(served.model) as url, client_of(url) as client:
        assert ask()
        served.fails = True
        with pytest.raises(openai.APIError, match=r"The server failed: .*no memory for it"):
            ask()
        served.fails = False
        assert httpx2.get(url.removesuffix("/v1") + "/health").status_code == 200
        assert ask()
