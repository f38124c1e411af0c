import logging, sys, time
from tests.simulation.run import draw, simulate
logging.disable(logging.CRITICAL)
a, b = int(sys.argv[1]), int(sys.argv[2])
t = time.time()
bad = 0
for seed in range(a, b):
    report, world = simulate(draw(seed))
    if report.violations or b - a <= 5:
        bad += bool(report.violations)
        print(seed, report)
print((time.time() - t) / (b - a), "s a seed", bad, "bad")
