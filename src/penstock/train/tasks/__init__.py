"""What a run trains: a file for each kind of model, behind one small interface."""
