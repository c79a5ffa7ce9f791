"""EAGLE, EAGLE-2 and EAGLE-3 heads."""

from sharesd.drafters.registry import DrafterSpec, HeadSpec, Need, Support

SPEC = DrafterSpec(
    name="eagle",
    kind="head",
    order=0,
    help="a trained head drafts token by token, from the target's hidden states",
    build="sharesd.drafters.eagle.drafter:build",
    needs=frozenset({Need.HIDDEN_STATES}),
    supports=frozenset({Support.TREES}),
    heads=(
        HeadSpec(
            layout="eagle",
            architecture="LlamaForCausalLMEagle",
            build="sharesd.drafters.eagle.head:Eagle",
            help="train an EAGLE head",
            training={"draft_vocab": None, "feature_weight": 0.1},
        ),
        HeadSpec(
            layout="eagle3",
            architecture="LlamaForCausalLMEagle3",
            marks=frozenset({"layers.0.hidden_norm.weight"}),
            max_layers=16,
            build="sharesd.drafters.eagle.head:Eagle3",
            help="train an EAGLE-3 head",
            training={"draft_vocab": 8192, "feature_weight": 0.0},
        ),
    ),
    source="a folder or hub id in a public layout of EAGLE, EAGLE-2 or EAGLE-3",
    colour="#332288",
)
