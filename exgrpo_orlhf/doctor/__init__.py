"""Does this machine or cluster train correctly with a layout? Checks to make before a long run (scripts/doctor.py).

machine.py      one machine: versions, GPU driver, compiler, kernels, disk, shared memory; no Ray, no model
tiny.py         a small model of the bound architecture, and an experiment with it in the place of the bound work
cluster.py      the layout itself, with OpenRLHF's actors and engines: what is compared, in order
parity.py       its gradient against the plain computation
memory.py       healthy results of earlier examinations, for the line that train.py prints
"""
