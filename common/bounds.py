"""Histogram bounds of engine metrics, for the counting and the exporting process."""

STEP_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08),
    *(0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24),
)
BATCH_REQUESTS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
BATCH_TOKENS = (16.0, 64.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0)
RUN_TOKENS = tuple(float(num_tokens) for num_tokens in range(1, 17))
READ_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
HANDOFF_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
