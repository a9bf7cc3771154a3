"""The delegate transport: a light process beside each rank carries its messages while it computes, exactly once.

    rank 0                       its delegate                    rank 1's delegate                      rank 1

    copies a message  | slot |   sends what is       chunk a     reads chunks right   | slot |   uses the message
    in, piece by      |aabbcc|   there, chunk by  ==lane 0====>  into the message's   |aabbcc|   where it lies, gives
    piece             |......|   chunk            ==lane 1====>  slot                 |......|   the slot back
                       memory                        chunk b                           memory
    SEND 7  -------ring------>                                             MESSAGE 7 -----ring------>
            <----- ANSWERED 7    all are answered <--ANSWER----            <---------- FREE

Copying in, the wire and reading overlap. Lanes are TCP connections over the best interfaces that work; any lane may
carry any chunk, and the chunks of a lane that fails go once more, over the others. Between ranks that exchange
messages in one direction, delegates connect in both: by that each knows whether the other is there.

transport        the rank's end: send, arrivals, wait, take
boxes            the process as the rank has it, what was sent or came in, and how its links are
payload_copies   payloads into slots of shared memory, and out
carrier/         what the delegate process runs
"""

from penstock.runtime.transport.delegate.boxes import Counters
from penstock.runtime.transport.delegate.transport import DelegateTransport

__all__ = ["Counters", "DelegateTransport"]
