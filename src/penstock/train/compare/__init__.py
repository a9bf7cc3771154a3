"""Schedules side by side: the same model trained on the same data by each, and the same costs simulated.

contenders    one settings each, alike in all but the schedule
result        how fast, how busy, what held and met, by simulation over common costs; what each learned, for real;
              and all of it as rows and as JSON
run           the comparison, and its page with charts of the loss
"""
