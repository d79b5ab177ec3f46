# Benchmarks; included by the Makefile.
.PHONY: bench-dataplane
bench-dataplane: $(READY) ## The data plane next to its peer, minutes (OPTIONS=--smoke for seconds)
	$(BIN)/python -m bench.dataplane $(OPTIONS)
