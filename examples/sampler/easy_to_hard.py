"""A sampler that moves from easy prompts to hard ones as the model learns."""


class EasyToHard:
    """Draws in turn from `size` prompts; when their last rewards average `enough`, from the next, harder ones."""

    def __init__(self, prompts, seed, *, size=64, enough=0.8):
        self.ids = [prompt.id for prompt in sorted(prompts, key=lambda prompt: prompt.extra.get("level", 0))]
        self.size, self.enough = min(size, len(self.ids)), enough
        self.begin, self.drawn, self.last = 0, 0, {}

    def next(self, count):
        window = self.ids[self.begin : self.begin + self.size]
        self.drawn += count
        return [window[number % self.size] for number in range(self.drawn - count, self.drawn)]

    def learn(self, rewards):
        self.last |= {name: sum(values) / len(values) for name, values in rewards.items() if values}
        known = [self.last.get(name, 0) for name in self.ids[self.begin : self.begin + self.size]]
        if sum(known) / self.size >= self.enough:
            self.begin = min(self.begin + self.size, len(self.ids) - self.size)

    def state(self):
        return [self.begin, self.drawn, self.last]

    def load_state(self, state):
        self.begin, self.drawn, self.last = state
