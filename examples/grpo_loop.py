"""GRPO as one loop: what a run does in a round, without Lightning and without callbacks.

    python examples/grpo_loop.py                        # 20 rounds of Countdown with vLLM
    python examples/grpo_loop.py --engine transformers  # without vLLM

`lit-rlsched fit` runs the same parts. It adds schedules, checkpoints, validation and logs.
"""

import argparse
from collections.abc import Sequence
from contextlib import closing

import torch

from lit_rlsched import Sample, Sampling, eos_token_ids, load_policy, load_tokenizer
from lit_rlsched.data import Countdown, PromptSource, make_prompts, repeat
from lit_rlsched.engines import EngineSpec, TransformersEngine, VLLMEngine
from lit_rlsched.rewards import RewardScheduler, countdown_reward
from lit_rlsched.rollout import Rollout, RolloutSession, Scorer
from lit_rlsched.training import (
    OptimizerStep,
    WeightSync,
    completion_logprobs,
    group_relative,
    policy_loss,
    reward_matrix,
)


def main(argv: Sequence[str] | None = None) -> torch.nn.Module:
    """Train, print the mean reward of each round, and return the policy."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    engines, model = ["vllm", "transformers"], "examples/countdown/model"
    parser.add_argument("--engine", choices=engines, default="vllm", help="What decodes.")
    parser.add_argument("--model", default=model, help="Folder or hub name of the policy.")
    parser.add_argument("--rounds", type=int, default=20, help="Rounds, an optimizer step each.")
    parser.add_argument("--prompts", type=int, default=32, help="Prompts per round.")
    parser.add_argument("--generations", type=int, default=8, help="Completions per prompt.")
    args = parser.parse_args(argv)

    # The policy, its optimizer, and prompts.
    policy = load_policy(args.model)
    tokenizer = load_tokenizer(args.model)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0)
    prompts = make_prompts(Countdown(size=1000).rows(), tokenizer, max_prompt_length=256)
    source = PromptSource(prompts, seed=0)
    sampling = Sampling(max_completion_length=512)

    # An engine that decodes, processes that score, and the session that runs both.
    engine = VLLMEngine() if args.engine == "vllm" else TransformersEngine()
    spec = EngineSpec(
        model=args.model,
        slots=args.prompts * args.generations,
        max_model_len=256 + sampling.max_completion_length,
        eos_token_ids=eos_token_ids(policy, tokenizer),
        policy=policy,
    )
    rewards = RewardScheduler([countdown_reward])
    scorer = Scorer(rewards, lambda ids: tokenizer.decode(ids, skip_special_tokens=True))
    sync = WeightSync(engine, spec, policy, probe=prompts[:2])

    with closing(RolloutSession(engine, spec, scorer, sync, seed=0)) as session:
        for version in range(args.rounds):
            # 1. Rollout: load the policy's weights into the engine and check that it decodes with
            # them, draw a group of completions per prompt, and score each once it is finished.
            draws = source.draw(args.prompts)
            groups = [repeat(d.prompt, args.generations, d.key, sampling) for d in draws]
            rollout = Rollout(session, groups, version)
            rollout.load_weights()
            rollout.run()  # fills `groups`

            # 2. Advantages: the reward relative to the completions of the same prompt.
            reward = reward_matrix(groups, rewards.weights)  # [prompts, generations]
            for group, row in zip(groups, group_relative(reward).tolist(), strict=True):
                for completion in group.completions:
                    completion.advantage = row[completion.index]

            # 3. Update: one optimizer step, whose gradient is the sum over its micro-batches.
            samples = [Sample(group, c) for group in groups for c in group.completions]
            for batch in OptimizerStep(samples, micro_batch_tokens=4096):
                logp, _ = completion_logprobs(policy, **batch.logprob_inputs)
                loss, _ = policy_loss(logp, **batch.loss_inputs)
                loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            print(f"round {version}: reward {reward.nanmean():.3f}", flush=True)
    return policy


if __name__ == "__main__":
    main()
