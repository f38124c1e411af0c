/** What the terms on the page mean, in one or two sentences. The keys are the labels as the page shows them. */

export const EXPLANATIONS: Record<string, string> = {
  // The run
  Model: "The size of the model. A parameter is one number that training adjusts.",
  Text: "What the model learns from. Each member reads other parts of it.",
  "Your share": "The part of all tokens of the run that this node has contributed.",
  Rank: "This node's place among all members that ever contributed, by tokens.",
  Streak: "The newest rounds in a row that include this node's work.",
  "Time left": "An estimate from the speed of the newest rounds. It changes when members come and go.",
  // This node
  Tokens: "A token is a piece of text, about three quarters of a word. The model is trained one token at a time.",
  Rounds: "Rounds whose result includes this node's work.",
  "Compute time": "How long the device of this node has computed for the run.",
  "Busy, last round": "The share of the last round's time in which the device computed instead of waiting.",
  Sent: "Data sent to other members since this node was made.",
  Received: "Data received from other members since this node was made.",
  Relayed: "Data passed on between members that cannot reach each other.",
  Round: "Members train alone for a while and then average their work. That is a round. The first one has the number 0.",
  "This round": "How long this node has trained in this round, and how long the round lasts.",
  "Inner step": "One small change of the model by this node alone. A round has many of them.",
  "Next sync": "When this node averages its work with the other members.",
  Loss: "How badly the model predicts text. Lower is better. Evaluated: on text that it never trains on.",
  Speed: "Tokens that this node trains on in a second.",
  Electricity: "What the device used while it trained. A meter counts all that runs on the device. Without a meter it is an estimate from the time of computing.",
  Traffic: "Data that this node exchanged with other members. Downloads of data sets are not counted.",
  // The swarm
  Training: "Members that train at this moment.",
  Together: "Tokens that all members train on in a second.",
  "Busy, mean": "The share of time in which the members' devices compute instead of waiting, on average.",
  "Tokens seen": "Tokens that all members together have trained on since the run began.",
};
