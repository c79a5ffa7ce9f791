"""Parallel heads, which draft all tokens in one pass."""

from sharesd.drafters.registry import DrafterSpec, HeadSpec, Need, Support

SPEC = DrafterSpec(
    name="parallel",
    kind="head",
    order=1,
    help="a trained head drafts all tokens in one pass",
    build="sharesd.drafters.parallel.drafter:build",
    needs=frozenset({Need.HIDDEN_STATES}),
    supports=frozenset({Support.TREES}),
    heads=(
        HeadSpec(
            layout="parallel",
            architecture="LlamaForCausalLMParallel",
            marks=frozenset({"mask_states"}),
            is_public=False,
            max_layers=2,
            build="sharesd.drafters.parallel.head:Parallel",
            help="train a head that drafts all tokens in one pass",
            training={"draft_vocab": 8192, "feature_weight": 0.0, "unroll": "5"},
        ),
    ),
    source="a folder that `sharesd train parallel` wrote",
    colour="#882255",
)
