"""The parts that charts are made of; `penstock.draw.chart` is what others use."""
