"""Several hosts on one machine: network namespaces with real TCP between them, and links that turn slow or
fail on request.

    with Lab(num_hosts=2, links="0:1=latency:30ms") as lab:
        process = lab.start(1, ["python", "train.py"])
        lab.interface_down(1, 0)

`Lab` makes a lab, changes it and removes it. `penstock lab` does the same from a terminal.
"""

from penstock.lab.kernel import missing
from penstock.lab.lab import Lab
from penstock.lab.layout import LabError, LabMisuse, Layout
from penstock.lab.process import HostProcess

__all__ = ["HostProcess", "Lab", "LabError", "LabMisuse", "Layout", "missing"]
