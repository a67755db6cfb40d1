// Every metric that the page reads, in one place; a test looks each of them up in a real server's /metrics.
// Histograms stand without their _bucket, _count and _sum.

export const METRICS = Object.freeze({
  steps: "turnout_steps_total",
  generationTokens: "turnout_generation_tokens_total",
  firstToken: "turnout_time_to_first_token_seconds",
  interToken: "turnout_inter_token_latency_seconds",
  drafts: "turnout_spec_decode_num_drafts_total",
  acceptedTokens: "turnout_spec_decode_num_accepted_tokens_total",
  acceptedByPosition: "turnout_spec_decode_num_accepted_tokens_per_pos_total",
  draftChoice: "turnout_spec_decode_choice_info",
  commRounds: "turnout_comm_rounds_total",
  commBytes: "turnout_comm_bytes_total",
  commSeconds: "turnout_comm_seconds_total",
});
