# Benchmarks; included by the Makefile.
.PHONY: bench-abuse bench-abuse-memory bench-page bench-samples bench-silence bench-controller bench-dataplane bench-e2e bench-learning bench-pace bench-tails bench-one-gpu bench-joins bench-trainer bench-trainer-peer bench-rollout bench-reply-formats bench-episodes bench-weightsync bench-recovery
bench-dataplane: $(READY) ## The data plane next to its peer, minutes (OPTIONS=--smoke for seconds)
	$(BIN)/python -m bench.dataplane $(OPTIONS)

bench-learning: $(READY) ## sort4 with every algorithm through the whole system, half an hour (OPTIONS=--smoke for minutes)
	$(BIN)/python -m bench.learning $(OPTIONS)
	$(BIN)/python -m bench.learning.overlap $(OPTIONS)

bench-e2e: $(READY) ## The whole system synchronous and asynchronous beside its limit, two GPUs (OPTIONS=--smoke without any)
	$(BIN)/python -m bench.e2e $(OPTIONS)

bench-trainer: $(READY) ## Packed against padded training steps (OPTIONS=--smoke on a machine without a GPU)
	$(BIN)/python -m bench.trainer $(OPTIONS)
	$(BIN)/python -m bench.trainer.prefixes $(OPTIONS)
	$(BIN)/python -m bench.trainer.mixtures $(OPTIONS)
	$(BIN)/python -m bench.trainer.memory $(OPTIONS)

bench-trainer-peer: $(READY) ## Shared prefixes beside TRL's trie; needs trl (OPTIONS=--smoke without a GPU)
	$(BIN)/python -m bench.trainer.peer $(OPTIONS)

bench-one-gpu: $(READY) ## A whole run on one GPU, with vLLM and without a setting for memory (OPTIONS=--smoke without any)
	$(BIN)/python -m bench.one_gpu $(OPTIONS)

bench-joins: $(READY) ## A rollout that joins a run which trains, and leaves it, on one GPU, minutes (OPTIONS=--smoke without any)
	$(BIN)/python -m bench.joins $(OPTIONS)

bench-rollout: $(READY) ## Engines, interruptions, failing rewards, learning; half an hour
	$(BIN)/python -m bench.rollout.throughput
	$(BIN)/python -m bench.rollout.interruption
	$(BIN)/python -m bench.rollout.rewards
	$(BIN)/python -m bench.rollout.learning

bench-episodes: $(READY) ## 2,000 agents at once on one rollout: overhead of each turn, memory; half an hour (OPTIONS=--smoke for one minute)
	$(BIN)/python -m bench.rollout.episodes $(OPTIONS)

bench-reply-formats: $(READY) ## Parsers of tool calls and reasoning beside vLLM's tests (OPTIONS="--sdist vllm-X.tar.gz")
	$(BIN)/python -m bench.reply_formats $(OPTIONS)

bench-tails: $(READY) ## Responses of hours and of 100,000 tokens, killed and resumed, an hour (OPTIONS=--smoke for minutes)
	$(BIN)/python -m bench.tails $(OPTIONS)

bench-weightsync: $(READY) ## Weight sync against the raw wire (OPTIONS=--smoke on a machine without a GPU)
	$(BIN)/python -m bench.weightsync $(OPTIONS)
	$(BIN)/python -m bench.weightsync.end_to_end $(OPTIONS)
	$(BIN)/python -m bench.weightsync.shared $(OPTIONS)

bench-recovery: $(READY) ## Rollouts killed at random: how soon the others serve the new version
	$(BIN)/python -m tests.faults.weight_kills

bench-controller: $(READY) ## One controller process between fakes: rates, latencies, memory (OPTIONS=--smoke for seconds)
	$(BIN)/python -m bench.controller $(OPTIONS)

bench-page: $(READY) ## How soon each view of the run page is there, with 3 runs of 10,000 steps, in Chromium; a minute
	$(BIN)/python -m bench.page $(OPTIONS)

bench-samples: $(READY) ## What keeping samples costs rollouts and the controller, minutes (OPTIONS=--smoke for seconds)
	$(BIN)/python -m bench.samples $(OPTIONS)

bench-silence: $(READY) ## How long a run that starts says nothing, and how long --help takes, a minute (OPTIONS=--smoke for half)
	$(BIN)/python -m bench.silence $(OPTIONS)

bench-pace: $(READY) ## How fast a run can be, with a real controller and fakes that take a GPU's time, minutes
	$(BIN)/python -m bench.pace $(OPTIONS)

bench-abuse-memory: $(READY) ## What a stranger's 1,000 connections to each port cost, ten minutes (OPTIONS=--smoke for one)
	$(BIN)/python -m bench.abuse.memory $(OPTIONS)

bench-abuse: $(READY) ## Two honest projects while a third identity abuses every port, ten minutes (OPTIONS=--smoke for half of one)
	$(BIN)/python -m bench.abuse $(OPTIONS)
