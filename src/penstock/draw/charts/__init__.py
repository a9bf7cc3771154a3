"""The parts of charts. Other packages use `penstock.draw.chart`."""
