export class Live { constructor(root){this.root=root} show(){} hide(){} retry(){} }
