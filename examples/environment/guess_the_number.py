"""An environment of one's own: a user, in place of tools, answers the model between its turns."""

from ctpo_megatron.environments import Message


class GuessTheNumber:
    """The user has a number in mind, the prompt's answer, and says whether a guess is too low or too high."""

    def __init__(self, polite=False):
        self.please = " Please try again." if polite else ""

    async def run(self, episode):
        number = int(episode.prompt.answer)
        while True:
            turn = await episode.generate()
            guess = turn.text.strip()
            if guess == str(number):
                return episode.finish(guess)
            episode.reply(Message("user", self.hint(guess, number) + self.please))

    @staticmethod
    def hint(guess, number):
        if not guess.isdecimal():
            return "Say a number."
        return "Too low." if int(guess) < number else "Too high."


def found(trajectory, prompt):
    """The reward: 1 for the number. Only `finish` leaves a final text."""
    return float(trajectory.final_text == prompt.answer)
