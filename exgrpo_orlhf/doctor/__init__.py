"""Does this machine or cluster train correctly with a layout? Checks to make before a long run (scripts/doctor.py).

machine.py      one machine: versions, GPU driver, compiler, kernels, disk, shared memory; no Ray, no model
tiny.py         a small model of the bound architecture, and an experiment with it in the place of the bound work
examination.py  from gin files to findings, in order
cluster.py      the checks that need the layout at work; actors.py, worker.py: what OpenRLHF's actors return for them
parity.py       its gradient against the plain computation
memory.py       healthy results of earlier examinations, for the line that train.py prints
"""
