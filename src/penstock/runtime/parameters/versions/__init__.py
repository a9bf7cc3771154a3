"""The weights of a copy of a stage if updates come between its ops, and the rules by which ops read them.

    rule = rule_of("pipedream")                                what F reads, what B reads: `rules`
    weights = CopyWeights(stage, schedule, 0, 0, rule, owns=True)
    optimizer = torch.optim.SGD(weights.masters.values(), lr=0.1)

| rule            | forward reads           | backward reads          | holds                       |
|-----------------|-------------------------|-------------------------|-----------------------------|
| `none`          | newest                  | newest                  | one version                 |
| `pipedream`     | newest                  | what its forward read   | one for each update between |
| `vnag`          | the same, with NAdam    |                         |                             |
| `pipedream-2bw` | one before its window's | the same                | two                         |
| `spectrain`     | predicted by momentum   | predicted by momentum   | one and the prediction      |
| `xpipe`         | predicted by Adam       | newest                  | one and the prediction      |
| `pipedream-lr`  | as `pipedream`          | as `pipedream`          | the same; lower rates where |
| `xpipe-lr`      | as `xpipe`              | as `xpipe`              | gradients are late          |

rules       what each op reads, by each rule      copy_weights    one copy's weights, bound before each op
versioned   parameters that change together, and which version each op reads
"""

from penstock.runtime.parameters.versions.copy_weights import CopyWeights, TiedLeaf, Write
from penstock.runtime.parameters.versions.rules import VersionRule, rule_of

__all__ = ["CopyWeights", "TiedLeaf", "VersionRule", "Write", "rule_of"]
