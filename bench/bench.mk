# Benchmarks; included by the Makefile.
.PHONY: bench-abuse bench-bits bench-cheats bench-long-run bench-abuse-memory bench-page bench-samples bench-silence bench-start bench-controller bench-dataplane bench-e2e bench-learning bench-pace bench-tails bench-one-gpu bench-fp8 bench-joins bench-trainer bench-trainer-peer bench-rollout bench-reply-formats bench-episodes bench-sandboxes bench-replay bench-replay-gpu bench-weightsync bench-recovery bench-objects bench-scaling
bench-dataplane: $(READY) ## Data plane against its peer, minutes (OPTIONS=--smoke for seconds)
	$(BIN)/python -m bench.dataplane $(OPTIONS)

bench-learning: $(READY) ## sort4 with every algorithm, and examples of agents and images, through the whole system, an hour (OPTIONS=--smoke for minutes)
	$(BIN)/python -m bench.learning $(OPTIONS)
	$(BIN)/python -m bench.learning.overlap $(OPTIONS)
	$(BIN)/python -m bench.learning.agents $(OPTIONS)

bench-e2e: $(READY) ## Synchronous and asynchronous runs against the hardware limit, two GPUs (OPTIONS=--smoke without a GPU)
	$(BIN)/python -m bench.e2e $(OPTIONS)

bench-trainer: $(READY) ## Packed against padded training steps (OPTIONS=--smoke on a machine without a GPU)
	$(BIN)/python -m bench.trainer $(OPTIONS)
	$(BIN)/python -m bench.trainer.prefixes $(OPTIONS)
	$(BIN)/python -m bench.trainer.mixtures $(OPTIONS)
	$(BIN)/python -m bench.trainer.memory $(OPTIONS)
	$(BIN)/python -m bench.trainer.layouts

bench-trainer-peer: $(READY) ## Shared prefixes against TRL's trie; needs trl (OPTIONS=--smoke without a GPU)
	$(BIN)/python -m bench.trainer.peer $(OPTIONS)

bench-one-gpu: $(READY) ## A run on one GPU with vLLM and default memory settings (OPTIONS=--smoke without a GPU)
	$(BIN)/python -m bench.one_gpu $(OPTIONS)

bench-fp8: $(READY) ## Rollouts in FP8 against bfloat16 with vLLM on one GPU, half an hour (OPTIONS=--smoke without a GPU)
	$(BIN)/python -m bench.fp8 engine $(OPTIONS)
	$(BIN)/python -m bench.fp8 run $(OPTIONS)
	$(BIN)/python -m bench.fp8 learning $(OPTIONS)

bench-joins: $(READY) ## A rollout that joins and leaves a running run, on one GPU, minutes (OPTIONS=--smoke without a GPU)
	$(BIN)/python -m bench.joins $(OPTIONS)

bench-rollout: $(READY) ## Engines, batch invariance, learning with partial rollout, speculation; half an hour
	$(BIN)/python -m bench.rollout.throughput
	$(BIN)/python -m bench.rollout.invariant
	$(BIN)/python -m bench.rollout.learning
	$(BIN)/python -m bench.rollout.speculation --smoke

bench-episodes: $(READY) ## 2,000 concurrent agents on one rollout: overhead per turn, memory; environments; half an hour (OPTIONS=--smoke for a minute)
	$(BIN)/python -m bench.rollout.episodes $(OPTIONS)
	$(BIN)/python -m bench.rollout.environments $(OPTIONS)

bench-sandboxes: $(READY) ## 1,000 sandboxed episodes, and a killed rollout; two minutes (OPTIONS=--smoke for seconds)
	$(BIN)/python -m bench.rollout.sandboxes $(OPTIONS)

bench-reply-formats: $(READY) ## Parsers of tool calls and reasoning against vLLM's tests (OPTIONS="--sdist vllm-X.tar.gz")
	$(BIN)/python -m bench.reply_formats $(OPTIONS)

bench-tails: $(READY) ## Responses of hours and of 100,000 tokens, killed and resumed; an hour (OPTIONS=--smoke for minutes)
	$(BIN)/python -m bench.tails $(OPTIONS)

bench-replay: $(READY) ## 100 asynchronous steps with kills, recorded and replayed, a quarter of an hour (OPTIONS=--smoke for minutes)
	$(BIN)/python -m tests.faults.replay $(OPTIONS)

bench-replay-gpu: $(READY) ## 20 steps of a real model with vLLM on one GPU, recorded and replayed; needs gguf (OPTIONS=--smoke without a GPU)
	$(BIN)/python -m bench.replay_gpu $(OPTIONS)

bench-weightsync: $(READY) ## Weight sync against the raw bandwidth of the link (OPTIONS=--smoke without a GPU)
	$(BIN)/python -m bench.weightsync $(OPTIONS)
	$(BIN)/python -m bench.weightsync.end_to_end $(OPTIONS)
	$(BIN)/python -m bench.weightsync.shared $(OPTIONS)
	$(BIN)/python -m bench.weightsync.storage $(OPTIONS)

bench-recovery: $(READY) ## Rollouts, and ranks of a trainer, killed at random: time until the others serve the new version, first causes
	$(BIN)/python -m tests.faults.weight_kills
	$(BIN)/python -m tests.faults.rank_kills

bench-controller: $(READY) ## One controller process with fake workers: rates, latencies, memory (OPTIONS=--smoke for seconds)
	$(BIN)/python -m bench.controller $(OPTIONS)

bench-page: $(READY) ## Load time of each view of the run page, with 3 runs of 10,000 steps, in Chromium; a minute
	$(BIN)/python -m bench.page $(OPTIONS)

bench-long-run: $(READY) ## Memory and files over 20,000 steps, hours (OPTIONS="--steps 5000", or --smoke for a minute)
	$(BIN)/python -m bench.long_run $(OPTIONS)

bench-samples: $(READY) ## Cost of sample records for rollouts and the controller, minutes (OPTIONS=--smoke for seconds)
	$(BIN)/python -m bench.samples $(OPTIONS)

bench-start: $(READY) ## Parts of a run's start, with empty and with filled caches (OPTIONS=--shape small on a CPU)
	$(BIN)/python -m bench.start $(OPTIONS)

bench-silence: $(READY) ## Longest silence of a starting run, and time of --help; a minute (OPTIONS=--smoke for half)
	$(BIN)/python -m bench.silence $(OPTIONS)

bench-pace: $(READY) ## Speed of a run with a real controller and simulated GPUs, minutes
	$(BIN)/python -m bench.pace $(OPTIONS)

bench-bits: $(READY) ## 20 steps of sort4 in CHECKOUT and here, equal to the bit; minutes (CHECKOUT=folder of a worktree)
	$(BIN)/python -m bench.bits $(CHECKOUT) $(OPTIONS)

bench-cheats: $(READY) ## Every cheat on every form of tests of programs, minutes (OPTIONS='--every 60' for a sample)
	$(BIN)/python -m bench.cheats $(OPTIONS)

bench-abuse-memory: $(READY) ## Cost of 1,000 unauthenticated connections to each port, ten minutes (OPTIONS=--smoke for one)
	$(BIN)/python -m bench.abuse.memory $(OPTIONS)

bench-abuse: $(READY) ## Two honest projects while a third identity attacks every port, ten minutes (OPTIONS=--smoke for half a minute)
	$(BIN)/python -m bench.abuse $(OPTIONS)

bench-objects: $(READY) $(S3_SERVER) ## Runs with everything in an object store: 30 kills, and step times against the disk, half an hour (OPTIONS=--smoke for minutes)
	$(BIN)/python -m bench.objects $(OPTIONS)

bench-scaling: $(READY) ## Speed over 1, 2, 4 and 8 GPUs, planned splits, weight sync, kills; hours (OPTIONS="--smoke --gpus 1 2 4" without a GPU)
	$(BIN)/python -m bench.scaling $(OPTIONS)
