# Benchmarks; included by the Makefile.
.PHONY: bench-asynchrony bench-controller bench-dataplane bench-learning bench-trainer bench-rollout bench-weightsync bench-recovery
bench-dataplane: $(READY) ## The data plane next to its peer, minutes (OPTIONS=--smoke for seconds)
	$(BIN)/python -m bench.dataplane $(OPTIONS)

bench-learning: $(READY) ## sort4 with every algorithm through the whole system, half an hour (OPTIONS=--smoke for minutes)
	$(BIN)/python -m bench.learning $(OPTIONS)
	$(BIN)/python -m bench.learning.overlap $(OPTIONS)

bench-asynchrony: $(READY) ## Synchronous against one step off with a model of real size, two GPUs (OPTIONS=--smoke without any)
	$(BIN)/python -m bench.learning.asynchrony $(OPTIONS)

bench-trainer: $(READY) ## Packed against padded training steps (OPTIONS=--smoke on a machine without a GPU)
	$(BIN)/python -m bench.trainer $(OPTIONS)

bench-rollout: $(READY) ## Engines, partial rollout, interruptions, failing rewards, learning; half an hour
	$(BIN)/python -m bench.rollout.throughput
	$(BIN)/python -m bench.rollout.partial
	$(BIN)/python -m bench.rollout.interruption
	$(BIN)/python -m bench.rollout.rewards
	$(BIN)/python -m bench.rollout.learning

bench-weightsync: $(READY) ## Weight sync against the raw wire (OPTIONS=--smoke on a machine without a GPU)
	$(BIN)/python -m bench.weightsync $(OPTIONS)
	$(BIN)/python -m bench.weightsync.end_to_end $(OPTIONS)

bench-recovery: $(READY) ## Rollouts killed at random: how soon the others serve the new version
	$(BIN)/python -m bench.weightsync.recovery

bench-controller: $(READY) ## One controller process between fakes: rates, latencies, memory (OPTIONS=--smoke for seconds)
	$(BIN)/python -m bench.controller $(OPTIONS)
