"""A judge behind HTTP: a model at an OpenAI-compatible server says whether an answer is right, within a deadline."""

import os

import aiohttp

QUESTION = "Question: {question}\nReference: {reference}\nAnswer: {answer}\nIs the answer right? Reply with yes or no."


class Judge:
    """Made once in each worker. No answer in time, or neither yes nor no, is no verdict: None."""

    text_only = True  # token lists are not needed, and would be copied for each call

    def __init__(self, *, url, model, deadline_s, tries=2):
        self.url, self.model, self.tries = url, model, tries
        self.limit = aiohttp.ClientTimeout(total=deadline_s)
        self.session = None

    async def __call__(self, trajectory, prompt):
        if self.session is None:  # within the worker's event loop
            key = os.environ.get("JUDGE_API_KEY", "")  # never in a configuration, which the run directory keeps
            self.session = aiohttp.ClientSession(timeout=self.limit, headers={"Authorization": f"Bearer {key}"})
        question = prompt.messages[-1]["content"]
        text = QUESTION.format(question=question, reference=prompt.answer, answer=trajectory.final_text)
        for _ in range(self.tries):
            try:
                verdict = await self.ask(text)
            except (TimeoutError, aiohttp.ClientError):
                continue
            return {"yes": 1.0, "no": 0.0}.get(verdict)
        return None

    async def ask(self, text):
        body = {"model": self.model, "temperature": 0, "messages": [{"role": "user", "content": text}]}
        async with self.session.post(f"{self.url}/chat/completions", json=body, raise_for_status=True) as answer:
            return (await answer.json())["choices"][0]["message"]["content"].strip().lower().rstrip(".")
