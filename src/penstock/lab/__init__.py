"""Several hosts on one machine: network namespaces with real TCP between them, and links that turn slow or
fail on request.

    with Lab(num_hosts=2, links="0:1=latency:30ms") as lab:
        process = lab.start(1, ["python", "train.py"])
        lab.interface_down(1, 0)

`Lab` makes a lab and removes it, `RunningLab` changes one that runs, and `penstock lab` does both from a terminal.
"""

from penstock.lab.errors import LabError, LabMisuse
from penstock.lab.lab import Lab
from penstock.lab.layout import Layout
from penstock.lab.permitted import missing
from penstock.lab.process import HostProcess
from penstock.lab.running import RunningLab

__all__ = ["HostProcess", "Lab", "LabError", "LabMisuse", "Layout", "RunningLab", "missing"]
