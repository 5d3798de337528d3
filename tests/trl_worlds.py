"""Environments in the form of TRL's examples: an echo, and a game of words with a client."""


class EchoClient:
    """Stands for a client of a server that says what it is told, and likes long messages."""

    def step(self, message):
        return {"echoed": message, "reward": len(message) / 10}


class Echo:
    def __init__(self):
        self.client = EchoClient()
        self.reward = 0.0

    def reset(self, **kwargs) -> str | None:
        self.reward = 0.0
        return None

    def echo(self, message: str) -> str:
        """Echo a message.

        Args:
            message: The message.

        Returns:
            The same message.
        """
        answer = self.client.step(message)
        self.reward = answer["reward"]
        return answer["echoed"]


class WordClient:
    """Stands for a client of a server that tells the whole game so far."""

    def reset(self, secret):
        self.secret, self.told = secret, "Guess a word of five letters."
        return self.told

    def step(self, guess):
        places = zip(guess, self.secret, strict=False)
        marks = ["G" if a == b else "Y" if a in self.secret else "X" for a, b in places]
        self.told += f"\n{' '.join(guess)}\n{' '.join(marks)}\n"
        return {"told": self.told, "reward": marks.count("G") / 5, "done": guess == self.secret}


class Words:
    def __init__(self):
        self.client = WordClient()

    def reset(self, secret, **kwargs) -> str | None:
        self._told = self.client.reset(secret)
        self.reward, self.done = 0.0, False
        return self._told

    def guess(self, guess: str) -> str:
        """Guess the word.

        Args:
            guess: A word of five letters.

        Returns:
            What the game says of it.
        """
        if self.done:
            raise ValueError("Game over.")
        answer = self.client.step(guess)
        news, self._told = answer["told"][len(self._told) :], answer["told"]
        self.reward, self.done = answer["reward"], answer["done"]
        return news

    def get_reward(self) -> float:
        return self.reward


def reward_of(environments, **kwargs):
    """The reward that an environment keeps, as in TRL's examples."""
    return [environment.reward for environment in environments]
