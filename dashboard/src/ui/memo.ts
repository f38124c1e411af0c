/** A component that renders again only for other properties. */

import { Component, type ComponentType, type FunctionComponent, h } from "preact";

export function memo<Props extends object>(Inner: FunctionComponent<Props>): ComponentType<Props> {
  return class Memo extends Component<Props> {
    override shouldComponentUpdate(next: Readonly<Props>): boolean {
      return (Object.keys(next) as (keyof Props)[]).some((key) => next[key] !== this.props[key]);
    }

    override render() {
      return h(Inner, this.props as Props);
    }
  };
}
