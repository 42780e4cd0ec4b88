"""An agent that checks each answer in a conversation of its own, and tries again."""

import openai


async def solve_and_check(task, *, rounds):
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:

        async def ask(messages):
            completion = await client.chat.completions.create(model=task.model, messages=messages)
            return completion.choices[0].message

        history, question = [*task.messages], task.messages[-1]["content"]
        for _ in range(rounds):
            answer = await ask(history)
            check = f"{question}\nAnswer: {answer.content}\nIs it right? Say yes or no."
            verdict = await ask([{"role": "user", "content": check}])
            if "yes" in verdict.content.lower():
                break
            history += [answer, {"role": "user", "content": "That is wrong. Try again."}]
        return answer.content
